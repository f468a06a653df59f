"""The embedded engine over HTTP: streams, pauses and version spans across an update, refusals. A real child process."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from engine_process import running_engine
from tiny_models import make_model

pytestmark = pytest.mark.slow
PROMPT = [3, 4, 5, 6, 7, 8]
LONG = {"max_new_tokens": 110, "ignore_eos": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two sets of weights of one shape, as directories and as transformers models."""
    found: dict[str, Any] = {}
    for name in ("old", "new"):
        directory = tmp_path_factory.mktemp(name)
        model = make_model("qwen3", directory)
        if name == "new":
            generator = torch.Generator().manual_seed(9)
            for parameter in model.parameters():
                parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
            model.save_pretrained(directory)
        found[name] = (directory, model.eval())
    return found


@pytest.fixture
def url(models: dict[str, Any]) -> Iterator[str]:
    with running_engine(models["old"][0], "--max-running", "8", "--max-total-tokens", "2048") as found:
        yield found


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> httpx.Response:
    return await client.post(path, json=body, timeout=60)


async def wait_for_tokens(client: httpx.AsyncClient, rid: str) -> Any:
    """Start a long generation as a stream; returns the reader once tokens flow."""
    body = {"input_ids": PROMPT, "rid": rid, "return_logprob": True, "stream": True, "sampling_params": LONG}
    context = client.stream("POST", "/generate", json=body, timeout=60)
    response = await context.__aenter__()
    lines = response.aiter_lines()
    async for line in lines:
        if line.startswith("data: ") and len(json.loads(line[6:])["output_ids"]) >= 3:
            return context, lines
    raise AssertionError("the stream ended early")


async def last_chunk(lines: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    async for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            found = json.loads(line[6:])
    return found


def recompute(model: Any, ids: list[int], start: int, end: int) -> torch.Tensor:
    with torch.no_grad():
        logp = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
    positions = torch.arange(len(PROMPT) + start, len(PROMPT) + end)
    return logp[positions - 1, torch.tensor(ids)[positions]]


def check_span(model: Any, answer: dict[str, Any], start: int, end: int, *, equal: bool = True) -> None:
    ids = PROMPT + answer["output_ids"]
    given = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]][start:end])
    assert ((recompute(model, ids, start, end) - given).abs().max() < 2e-5).item() is equal


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_spans_across_an_update_are_the_policies_that_made_the_tokens(
    url: str, models: dict[str, Any], mode: str
) -> None:
    (_, old), (new_dir, new) = models["old"], models["new"]
    async with httpx.AsyncClient(base_url=url) as client:
        context, lines = await wait_for_tokens(client, "long")
        (await post(client, "/pause_generation", mode=mode)).raise_for_status()
        (
            await post(client, "/update_weights_from_disk", model_path=str(new_dir), weight_version="1")
        ).raise_for_status()
        (await post(client, "/continue_generation")).raise_for_status()
        answer = await last_chunk(lines)
        await context.__aexit__(None, None, None)
        spans = [(s["version"], s["start"], s["end"]) for s in answer["meta_info"]["weight_versions"]]
        check_span(old, answer, 0, spans[0][2])
        if mode == "abort":
            assert answer["meta_info"]["finish_reason"]["type"] == "abort"
            assert [version for version, _, _ in spans] == ["0"]
        else:
            assert [version for version, _, _ in spans] == ["0", "1"]
            assert (spans[0][1], spans[0][2], spans[1][2]) == (0, spans[1][1], 110)
            # retract computes the keys and values again: the rest is the new policy's alone. in_place keeps the old ones.
            check_span(new, answer, *spans[1][1:], equal=mode == "retract")
            check_span(old, answer, *spans[1][1:], equal=False)
        # Nothing computed under the old weights is shared with a new request; what retract computed again is of the new ones.
        prompt = PROMPT + answer["output_ids"][:20]
        again = (
            await post(
                client, "/generate", input_ids=prompt, return_logprob=True, sampling_params={"max_new_tokens": 2}
            )
        ).json()
        assert (again["meta_info"]["cached_tokens"] == 0) is (mode != "retract")
        with torch.no_grad():
            logp = torch.log_softmax(new(torch.tensor([prompt])).logits[0, -1], -1)
        assert again["meta_info"]["output_token_logprobs"][0][0] == pytest.approx(
            logp[again["output_ids"][0]].item(), abs=2e-5
        )


async def test_new_requests_wait_while_paused(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as client:
        await post(client, "/pause_generation", mode="retract")
        assert (await client.get("/health_generate")).status_code == 503
        waiting = asyncio.create_task(
            post(client, "/generate", input_ids=PROMPT, sampling_params={"max_new_tokens": 2})
        )
        await post(client, "/server_info")
        assert not waiting.done()
        await post(client, "/continue_generation")
        assert (await waiting).status_code == 200
        assert (await client.get("/health_generate")).status_code == 200


async def test_abort_by_id_and_a_client_that_goes_away_free_their_rows(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as client:
        await post(
            client, "/pause_generation", mode="in_place"
        )  # what is asked for now waits, and cannot end by itself
        asked = asyncio.create_task(post(client, "/generate", input_ids=PROMPT, rid="mine", sampling_params=LONG))
        gone = asyncio.create_task(post(client, "/generate", input_ids=PROMPT, rid="gone", sampling_params=LONG))
        while (await client.get("/server_info")).json()["num_waiting"] < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)  # the engine has no event of this to wait for
        await post(client, "/abort_request", rid="mine")
        assert (await asked).json()["meta_info"]["finish_reason"]["type"] == "abort"
        gone.cancel()
        async with asyncio.timeout(5):
            while (await client.get("/server_info")).json()["num_waiting"]:  # noqa: ASYNC110
                await asyncio.sleep(0)  # the engine has no event of this to wait for


async def test_updates_are_refused_by_reason_and_change_nothing(
    url: str, models: dict[str, Any], tmp_path: Path
) -> None:
    async with httpx.AsyncClient(base_url=url) as client:
        before = (await post(client, "/weights_checker", action="checksum")).json()["checksums"]
        for path, body, words in (
            ("/update_weights_from_tensor", {"serialized_named_tensors": ["AAAA"]}, "cannot be read"),
            ("/update_weights_from_tensor", {"serialized_named_tensors": []}, "has 0 entries"),
            ("/end_weight_update", {}, "begin_weight_update"),
            ("/update_weights_from_disk", {"model_path": str(tmp_path)}, "model.safetensors"),
            (
                "/update_weights_from_distributed",
                {"names": [], "dtypes": [], "shapes": []},
                "init_weights_update_group",
            ),
            ("/update_weights_from_tensor", {}, "malformed"),
            ("/pause_generation", {"mode": "hard"}, "hard"),
            ("/weights_checker", {"action": "reset"}, "reset"),
            ("/resume_memory_occupation", {"tags": ["x"]}, "x"),
        ):
            refused = await post(client, path, **body)
            assert (refused.status_code, words in refused.text) == (400, True), (path, refused.text)
        assert (await post(client, "/weights_checker")).json()["checksums"] == before
        assert (await client.post("/generate", content=b"{")).status_code == 400
        assert (
            await post(client, "/generate", input_ids=PROMPT, sampling_params={"max_new_tokens": 1})
        ).status_code == 200


async def test_memory_is_released_and_taken_again(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as client:
        (await post(client, "/pause_generation", mode="retract")).raise_for_status()
        (await post(client, "/release_memory_occupation", tags=["kv_cache"])).raise_for_status()
        (await post(client, "/resume_memory_occupation", tags=["kv_cache"])).raise_for_status()
        (await post(client, "/continue_generation")).raise_for_status()
        assert (
            await post(client, "/generate", input_ids=PROMPT, sampling_params={"max_new_tokens": 3})
        ).status_code == 200
        assert (await post(client, "/update_weight_version", new_version="7")).json()["new_version"] == "7"
        assert (await client.get("/model_info")).json()["weight_version"] == "7"
