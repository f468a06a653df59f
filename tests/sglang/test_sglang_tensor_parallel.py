"""One SGLang server of two tensor-parallel ranks behind `rlagent serve`: every transport, each rank's part proven by its checksums."""

from collections.abc import Iterator

import httpx
import pytest
import torch
from policies import Policies, continued
from sglang_process import START_S
from sglang_serve import Serve, checksums, publish, ready, running_serve

from rlagent.client import RouterClient

pytestmark = [pytest.mark.slow, pytest.mark.sglang]
TRANSPORTS = ["tensor", "distributed", "disk", "delta"]


@pytest.fixture(scope="module")
def served(policies: Policies, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    args = ("--tp-size", "2", "--disable-overlap-schedule")
    root = tmp_path_factory.mktemp("serve-tp2")
    with running_serve(policies.dirs["old"], root, *args, settings=("sampling.max_tokens=12",)) as found:
        yield found


async def difference(served: Serve, admin: RouterClient, policies: Policies, name: str, key: str) -> float:
    """How far the logprobs that a call records are from a policy's own."""
    async with httpx.AsyncClient(trust_env=False, timeout=START_S) as http:
        response = await http.post(
            f"{served.url}/v1/chat/completions", headers={"authorization": f"Bearer {key}"},
            json={"model": "policy", "messages": [{"role": "user", "content": "zz qq"}]},
        )  # fmt: skip
    (call,) = await admin.calls(response.headers["x-rlagent-session"])
    (choice,) = call["choices"]
    model = policies.models[name]
    expected = continued(model, model, call["prompt_ids"] + choice["output_ids"], 1)[len(call["prompt_ids"]) - 1 :]
    return float((torch.tensor(choice["logprobs"]) - expected).abs().max())


async def test_every_transport_reaches_both_ranks(served: Serve, policies: Policies) -> None:
    async with RouterClient(served.url) as admin:
        url = (await ready(admin))["url"]
        loaded = await checksums(url)
        assert len(loaded) == 2
        halves = [name for name in loaded[0] if loaded[0][name] != loaded[1][name]]
        assert any("qkv_proj" in name for name in halves)
        assert any("o_proj" in name for name in halves)
        assert await difference(served, admin, policies, "old", "started") < 1e-4
        digests = []
        for transport in TRANSPORTS:
            version = await publish(admin, policies.weights("new").items(), served, transport)
            assert (await ready(admin))["version"] == version
            assert await difference(served, admin, policies, "new", f"new-{transport}") < 1e-4
            digests.append(await checksums(url))
            assert all(digests[-1][rank][name] != loaded[rank][name] for rank in (0, 1) for name in halves)
            await publish(admin, policies.weights("old").items(), served, transport)
            assert await checksums(url) == loaded
        assert digests == [digests[0]] * len(TRANSPORTS)
