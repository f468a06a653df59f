"""`rlagent serve --engine sglang` as a process: an engine killed in mid-call and in mid-push, a learner that dies, a wrong shape.

One server for all tests; every test leaves an engine that serves a whole, known version.
"""

import asyncio
import json
import os
import re
import shutil
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from policies import Policies, continued
from sglang_process import START_S
from sglang_serve import Serve, checksums, publish, pusher, ready, running_serve

from rlagent.client import RouterClient
from rlagent.errors import RouterError, WeightSyncError

pytestmark = [pytest.mark.slow, pytest.mark.sglang]
MAX_TOKENS = 1500
END = 695  # a token that the old policy does not say
LEARNER = Path(__file__).parents[1] / "support" / "dying_learner.py"


@pytest.fixture(scope="module")
def served(policies: Policies, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """With a model whose completions are as long as they may be: its end is a token that it does not say."""
    root = tmp_path_factory.mktemp("serve")
    model = root / "model"
    shutil.copytree(policies.dirs["old"], model)
    for name, changes in (
        ("config.json", {"eos_token_id": END}),
        ("generation_config.json", {"eos_token_id": END}),
        ("tokenizer_config.json", {"eos_token": "<|endoftext|>"}),
    ):
        (model / name).write_text(json.dumps(json.loads((model / name).read_text()) | changes))
    settings = (f"sampling.max_tokens={MAX_TOKENS}", "engine.hang_timeout_s=30")
    with running_serve(model, root, "--disable-overlap-schedule", settings=settings) as found:
        yield found


async def long_call(serve: Serve, key: str, begun: asyncio.Event, chunks: int = 2) -> httpx.Response:
    """A streamed completion of MAX_TOKENS; `begun` is set after so many chunks."""
    async with (
        httpx.AsyncClient(trust_env=False, timeout=START_S) as http,
        http.stream(
            "POST", f"{serve.url}/v1/chat/completions", headers={"authorization": f"Bearer {key}"},
            json={"model": "policy", "stream": True, "messages": [{"role": "user", "content": "zz qq"}]},
        ) as response,
    ):  # fmt: skip
        lines = []
        async for line in response.aiter_lines():
            lines.append(line)
            if line.count('"content"') and len(lines) > 2 * chunks:
                begun.set()
        assert "data: [DONE]" in lines
        return response


async def whole_call(serve: Serve, key: str) -> httpx.Response:
    """A completion of MAX_TOKENS that is not streamed."""
    async with httpx.AsyncClient(trust_env=False, timeout=START_S) as http:
        return await http.post(
            f"{serve.url}/v1/chat/completions", headers={"authorization": f"Bearer {key}"},
            json={"model": "policy", "messages": [{"role": "user", "content": "zz qq"}]},
        )  # fmt: skip


async def recorded(admin: RouterClient, response: httpx.Response) -> tuple[list[int], dict[str, Any]]:
    (call,) = await admin.calls(response.headers["x-rlagent-session"])
    (choice,) = call["choices"]
    assert len(choice["output_ids"]) == len(choice["logprobs"])
    # The new policy, which is noise, may say the end.
    assert len(choice["output_ids"]) == MAX_TOKENS or choice["output_ids"][-1] == END
    return call["prompt_ids"], choice


async def test_an_engine_killed_in_mid_call_is_replaced_and_the_agent_notices_nothing(
    served: Serve, policies: Policies
) -> None:
    """Two calls side by side, one streamed and one not: what the dead engine had told of each begins its answer."""
    async with RouterClient(served.url) as admin:
        await ready(admin)
        begun = asyncio.Event()
        calls = [
            asyncio.create_task(whole_call(served, "killed-whole")),
            asyncio.create_task(long_call(served, "killed", begun, chunks=300)),
        ]
        await begun.wait()
        pid = served.engine_pid()
        logged = served.engine_log.stat().st_size
        os.kill(pid, signal.SIGKILL)
        found = [await recorded(admin, await call) for call in calls]
        assert (await ready(admin))["version"] == 0
        assert served.engine_pid() != pid
    old = policies.models["old"]
    for prompt, choice in found:
        assert [span["version"] for span in choice["versions"]] == [0]
        expected = continued(old, old, prompt + choice["output_ids"], 1)[len(prompt) - 1 :]
        assert (torch.tensor(choice["logprobs"]) - expected).abs().max() < 1e-4
    # What the engine that came after was asked to read: both prompts with their beginnings.
    log = served.engine_log.read_bytes()[logged:].decode()
    read = sum(map(int, re.findall(r"Prefill batch.*?#new-token: (\d+)", log)))
    assert read > len(found[0][0]) + len(found[1][0]) + 300 + 150


@pytest.mark.parametrize("transport", ["tensor", "delta"])
async def test_a_publish_in_mid_call_gives_two_spans_each_of_its_policy(
    served: Serve, policies: Policies, transport: str
) -> None:
    async with RouterClient(served.url) as admin:
        await ready(admin)
        before = await publish(admin, policies.weights("old").items(), served, transport)
        begun = asyncio.Event()
        call = asyncio.create_task(long_call(served, f"published-{transport}", begun))
        await begun.wait()
        version = await publish(admin, policies.weights("new").items(), served, transport)
        prompt, choice = await recorded(admin, await call)
        assert (await ready(admin))["version"] == version
    assert [span["version"] for span in choice["versions"]] == [before, version]
    middle = choice["versions"][1]["start"]
    ids = prompt + choice["output_ids"]
    given = torch.tensor(choice["logprobs"])
    by_old, by_new = (
        continued(model, model, ids, 1)[len(prompt) - 1 :] for model in (policies.models["old"], policies.models["new"])
    )
    assert (given[:middle] - by_old[:middle]).abs().max() < 1e-4
    assert (given[middle:] - by_new[middle:]).abs().max() < 1e-4


async def test_an_engine_killed_in_mid_bucket_comes_back_whole(served: Serve, policies: Policies) -> None:
    def killing() -> Iterator[tuple[str, torch.Tensor]]:
        for index, item in enumerate(policies.weights("new").items()):
            if index == 20:
                os.kill(served.engine_pid(), signal.SIGKILL)
            yield item

    async with RouterClient(served.url) as admin:
        await ready(admin)
        with pytest.raises(WeightSyncError, match="went away"):
            await publish(admin, killing(), served)
        engine = await ready(admin)
        assert engine["version"] == 0  # the newest snapshot on disk
        whole = await checksums(engine["url"])
        version = await publish(admin, policies.weights("new").items(), served)
        assert await checksums(engine["url"]) != whole
        await publish(admin, policies.weights("old").items(), served, "distributed")
        assert await checksums(engine["url"]) == whole
        assert (await ready(admin))["version"] == version + 1


@pytest.mark.parametrize("transport", ["tensor", "distributed"])
async def test_a_learner_killed_in_mid_publish_leaves_the_snapshot_serving(
    served: Serve, policies: Policies, transport: str
) -> None:
    """A process that is killed with half of its tensors sent; the next learner's publish is served."""
    async with RouterClient(served.url) as admin:
        engine = await ready(admin)
        await publish(admin, policies.weights("old").items(), served)
        whole = await checksums(engine["url"])
        current = (await admin.policy())["version"]
        learner = await asyncio.create_subprocess_exec(
            sys.executable, str(LEARNER), transport, str(policies.dirs["new"]), stdin=PIPE, stdout=PIPE
        )
        assert learner.stdin is not None
        assert learner.stdout is not None
        assert await learner.stdout.readline() == b"ready\n"
        ticket = await admin.begin_publish(step=current + 1, parent=current, lease_s=10.0)
        learner.stdin.write(f"{ticket.version} {' '.join(ticket.engines)}\n".encode())
        assert await learner.stdout.readline() == b"half\n"
        assert await checksums(engine["url"]) != whole  # half of it is in, and the engine is paused
        learner.kill()
        await learner.wait()
        begun = asyncio.Event()
        prompt, choice = await recorded(admin, await long_call(served, f"after-{transport}", begun))
        assert [span["version"] for span in choice["versions"]] == [0]  # it waited until the lease had run out
        old = policies.models["old"]
        expected = continued(old, old, prompt + choice["output_ids"], 1)[len(prompt) - 1 :]
        assert (torch.tensor(choice["logprobs"]) - expected).abs().max() < 1e-4
        assert (await ready(admin))["version"] == 0
        assert await checksums(engine["url"]) == whole
        with pytest.raises(RouterError):
            await admin.commit_publish(ticket.publish_id, checksum="", snapshot=None)
        version = await publish(admin, policies.weights("new").items(), served, transport)
        assert (await ready(admin))["version"] == version
        await publish(admin, policies.weights("old").items(), served, transport)
        assert await checksums(engine["url"]) == whole


async def test_a_wrong_shape_never_serves(served: Serve, policies: Policies) -> None:
    weights = {**policies.weights("new"), "model.norm.weight": torch.ones(3)}
    async with RouterClient(served.url) as admin:
        engine = await ready(admin)
        whole = await checksums(engine["url"])
        with pytest.raises(WeightSyncError, match=engine["url"]):
            await publish(admin, weights.items(), served)
        engine = await ready(admin)
        assert (engine["version"], await checksums(engine["url"])) == (0, whole)
        await publish(admin, policies.weights("new").items(), served)  # the next one that fits
        assert await checksums(engine["url"]) != whole
        version = await publish(admin, policies.weights("old").items(), served)
        assert await checksums(engine["url"]) == whole
        assert (await ready(admin))["version"] == version


@pytest.mark.parametrize("transport", ["tensor", "distributed"])
async def test_a_server_that_hangs_in_mid_push_is_replaced_and_never_serves_half_of_it(
    served: Serve, policies: Policies, transport: str
) -> None:
    """Its process is stopped: the push ends with the lease, the server is killed, and the next one holds the snapshot."""

    def stopping() -> Iterator[tuple[str, torch.Tensor]]:
        for index, item in enumerate(policies.weights("new").items()):
            if index == 20:
                os.kill(pid, signal.SIGSTOP)
            yield item

    async with RouterClient(served.url) as admin:
        engine = await ready(admin)
        await publish(admin, policies.weights("old").items(), served)
        whole = await checksums(engine["url"])
        pid = served.engine_pid()
        current = (await admin.policy())["version"]
        ticket = await admin.begin_publish(step=current + 1, parent=current, lease_s=10.0)
        sync = pusher(transport, served.model)
        with pytest.raises(WeightSyncError, match="before the publish's lease ran out"):
            await asyncio.to_thread(sync.push, ticket.engines, stopping(), version=ticket.version, until=ticket.until)
        begun = asyncio.Event()
        _, choice = await recorded(admin, await long_call(served, f"hung-{transport}", begun))
        assert [span["version"] for span in choice["versions"]] == [0]
        assert served.engine_pid() != pid
        assert await checksums((await ready(admin))["url"]) == whole
        sync.close()
        await publish(admin, policies.weights("new").items(), served, transport)
        await publish(admin, policies.weights("old").items(), served, transport)
        assert await checksums((await ready(admin))["url"]) == whole
