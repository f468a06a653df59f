"""Plays an environment with OpenEnv's own client, run in the package's own Python: `python openenv_player.py URL SEED MESSAGE...`.

Prints, as JSON, what each reset and step gave, then the state.
"""

import json
import sys

from openenv.core.generic_client import GenericEnvClient

if __name__ == "__main__":
    url, seed, *messages = sys.argv[1:]
    with GenericEnvClient(base_url=url).sync() as env:
        found = [env.reset(seed=int(seed)), *(env.step({"message": message}) for message in messages)]
        print(json.dumps([[one.observation, one.reward, one.done] for one in found]))
        print(json.dumps(env.state()))
