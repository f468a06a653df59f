"""The OpenEnv package itself, unmodified: its server feeds our loop, and its client plays our server."""

import asyncio
import json
import os
import subprocess
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from environments import stage

from rlagent.envs.openenv_client import OpenEnv
from rlagent.errors import EnvironmentFailedError
from rlagent.launch.local import free_port

pytestmark = [pytest.mark.agents, pytest.mark.slow]

HERE = Path(__file__).parent
START_S = 180.0
OURS = """
from rlagent.envs.openenv_client import Step

class Count:
    def reset(self, seed=0, **_given):
        self.at, self.steps = seed, 0
        return Step(observation={"text": f"after {self.at}?"}, reward=None, done=False)

    def step(self, action):
        self.steps += 1
        right = action["message"] == str(self.at + 1)
        self.at += right
        return Step(observation={"text": f"after {self.at}?"}, reward=float(right), done=self.at >= 2)

    def state(self):
        return {"episode_id": None, "step_count": self.steps}
"""
GAME = [["after 0?", None, False], ["after 0?", 0.0, False], ["after 1?", 1.0, False], ["after 2?", 1.0, True]]


@pytest.fixture
def python() -> str:
    """The python that has OpenEnv, from RLAGENT_OPENENV_PYTHON."""
    named = os.environ.get("RLAGENT_OPENENV_PYTHON")
    if not named:
        pytest.skip("RLAGENT_OPENENV_PYTHON is not set: see tests/agents/README.md")
    return named


@contextmanager
def serving(*command: str) -> Iterator[str]:
    """A server process that takes its port as the last argument; yields its URL once it answers /health."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen([*command, str(port)]) as process:
        try:
            deadline = time.monotonic() + START_S
            while not _healthy(url):
                assert process.poll() is None, f"{command} ended with {process.returncode}"
                assert time.monotonic() < deadline, f"{command} did not start"
                time.sleep(0.1)
            yield url
        finally:
            process.kill()
            process.wait()


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


async def test_the_packages_server_feeds_our_loop(tmp_path: Path, python: str) -> None:
    with serving(python, "-I", str(HERE / "openenv_game.py")) as url:
        async with OpenEnv(url) as env:
            first = await env.reset(seed=1)
            assert (first.observation["text"], first.reward, first.done) == ("after 1?", None, False)
            with pytest.raises(EnvironmentFailedError, match="refused"):
                await env.step({"massage": "2"})
            last = await env.step({"message": "2"})
            assert (last.observation["text"], last.reward, last.done) == ("after 2?", 1.0, True)
            assert (await env.state())["step_count"] == 1
        async with stage(tmp_path, "rlagent.envs.openenv_client:rollout") as played:
            found = await played.play({"url": url, "reset": {"seed": 0}, "observation": "text"}, ["5", "1", "2"])
    assert found.reward.components == {"return": 2.0}
    assert ["after 0?" in found.prompts[0], "after 1?" in found.prompts[2]] == [True, True]


async def test_the_packages_client_plays_our_server(tmp_path: Path, python: str) -> None:
    (tmp_path / "ours.py").write_text(OURS)
    ours = (sys.executable, "-m", "rlagent.envs.openenv_server", f"{tmp_path}/ours.py:Count", "--port")
    with serving(*ours) as url:
        player = await asyncio.create_subprocess_exec(
            python, "-I", str(HERE / "openenv_player.py"), url, "0", "5", "1", "2", stdout=PIPE
        )
        said, _ = await player.communicate()
    assert player.returncode == 0
    steps, state = map(json.loads, said.decode().splitlines())
    assert [[observation["text"], reward, done] for observation, reward, done in steps] == GAME
    assert state["step_count"] == 3
