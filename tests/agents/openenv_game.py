"""An environment as OpenEnv's users write and serve them, run in the package's own Python: `python openenv_game.py PORT`."""

import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Said(Action):
    message: str


class Seen(Observation):
    text: str


class Count(Environment[Said, Seen, State]):
    """Says a number up to 2; the last right answer ends it."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.at = self.steps = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_given: Any) -> Seen:
        self.at, self.steps = seed or 0, 0
        return Seen(text=f"after {self.at}?")

    def step(self, action: Said, timeout_s: float | None = None, **_given: Any) -> Seen:
        self.steps += 1
        right = action.message == str(self.at + 1)
        self.at += right
        return Seen(text=f"after {self.at}?", reward=float(right), done=self.at >= 2)

    @property
    def state(self) -> State:
        return State(step_count=self.steps)


if __name__ == "__main__":
    app = create_fastapi_app(Count, Said, Seen, max_concurrent_envs=4)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
