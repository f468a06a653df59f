"""Run a rollout function on one task in the environment of the agents: `python play.py FILE:FUNCTION TASK_JSON SESSION_ID`.

The session comes through the variables that any agent program gets; the outcome is the last line of stdout, as JSON.
"""

import asyncio
import json
import os
import sys

from rlagent.client import SessionHandle
from rlagent.loading import load_function
from rlagent.rollout import run_rollout

TIMEOUT_S = 150.0


def main() -> None:
    """Print {"status", "reward", "error"}."""
    spec, task, session_id = sys.argv[1:]
    function = load_function(spec, what="rollout function")
    session = SessionHandle(
        session_id=session_id, base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
    )
    outcome = asyncio.run(run_rollout(function, json.loads(task), session, TIMEOUT_S))
    reward = None if outcome.reward is None else outcome.reward.total
    print(json.dumps({"status": outcome.status, "reward": reward, "error": outcome.error}))


if __name__ == "__main__":
    main()
