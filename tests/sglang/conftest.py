"""One engine of each kind for a whole test run: the embedded one always, real SGLang where it is named or required."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import pytest
from engine_process import EngineClient, running_engine
from policies import CONTEXT, Policies
from sglang_process import running_sglang


@dataclass(frozen=True)
class Server:
    """A running engine with the old policy as version 0."""

    kind: str
    url: str


@pytest.fixture(scope="session")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    return Policies(tmp_path_factory.mktemp("policies"))


@pytest.fixture(scope="session", params=["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
def server(request: pytest.FixtureRequest, policies: Policies) -> Iterator[Server]:
    if request.param == "sglang":
        with running_sglang(
            policies.dirs["old"], "--context-length", str(CONTEXT), "--disable-overlap-schedule"
        ) as url:
            yield Server("sglang", url)
    else:
        with running_engine(policies.dirs["old"], "--max-running", "8", "--max-total-tokens", "16384") as url:
            yield Server("embedded", url)


@pytest.fixture
async def engine(server: Server, policies: Policies) -> AsyncIterator[EngineClient]:
    """A client of the engine; afterwards the old policy is back as version 0, and nothing runs."""
    found = EngineClient(server.url)
    yield found
    await found.post("/pause_generation", mode="abort")
    await found.post("/flush_cache?timeout=30")
    await found.http.post("/end_weight_update", json={})
    body = {"model_path": str(policies.dirs["old"]), "weight_version": "0", "flush_cache": False}
    await found.post("/update_weights_from_disk", **body)
    await found.post("/continue_generation")
    await found.http.aclose()
