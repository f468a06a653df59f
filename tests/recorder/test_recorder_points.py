"""Points of the recorder's checklist (docs/recording.md) that no other test shows: each test is named after its line."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import openai
import pytest
from fake_engine import Reply
from router_harness import EOS, MODEL, TOKENIZER, TOOLS, USER, always, router, said
from tiny_models import make_learner

from rlagent.buffer import Buffer
from rlagent.buffer.config import BufferConfig
from rlagent.client import RouterClient
from rlagent.engine.config import EngineConfig
from rlagent.router.config import RouterConfig, SamplingConfig
from rlagent.serve import serving
from rlagent.trainer.batch import pack
from rlagent.trainer.config import AdvantageConfig, LossConfig
from rlagent.types import Session

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("stream", [False, True])
async def test_ids_logprobs_versions_and_the_completion_count_have_equal_lengths(tmp_path: Path, stream: bool) -> None:
    ids = [*TOKENIZER.encode("The code is 7"), EOS]
    short = [{"version": "0", "start": 0, "end": len(ids) - 1}]
    gap = [{"version": "0", "start": 0, "end": 1}, {"version": "1", "start": 2, "end": len(ids)}]
    for spans in (short, gap):
        bad = Reply(ids=ids, spans=spans, finish={"type": "stop", "matched": EOS})
        async with router(tmp_path / f"{len(spans)}{stream}", always(bad)) as r:
            response = await r.chat(stream=stream)
            assert "not recorded" in response.text
            (session,) = await r.admin.sessions()
            assert await r.admin.calls(session["session_id"]) == []
    async with router(tmp_path / f"good{stream}", always(said("The code is 7"))) as r:
        response = await r.chat(stream=stream)
        (call,) = await r.calls(response)
        (choice,) = call["choices"]
        assert len(choice["output_ids"]) == len(choice["logprobs"]) == choice["versions"][-1]["end"] == len(ids)
        (row,) = await r.admin.trajectories(response.headers["x-rlagent-session"])
        assert len({len(row[name]) for name in ("token_ids", "loss_mask", "logprobs", "versions")}) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_past_a_stop_are_excluded(tmp_path: Path, stream: bool) -> None:
    """An engine that samples several tokens a step may answer more of them than the stop string needed."""
    past = Reply(
        ids=[*TOKENIZER.encode("The "), *(TOKENIZER.encode(letter)[0] for letter in "STOP over")],
        finish={"type": "stop", "matched": "STOP"},
    )
    async with router(tmp_path, always(past)) as r:
        response = await r.chat(stop="STOP", stream=stream)
        assert "over" not in response.text
        (call,) = await r.calls(response)
        (choice,) = call["choices"]
        assert TOKENIZER.decode(choice["output_ids"]) == "The STOP"
        assert len(choice["logprobs"]) == choice["versions"][-1]["end"] == len(choice["output_ids"])


@pytest.mark.slow
async def test_logprobs_at_another_temperature_equal_the_learners_recompute_at_it(tmp_path: Path) -> None:
    async with (
        serving(
            model_dir=MODEL, router=RouterConfig(), sampling=SamplingConfig(max_tokens=200, temperature=0.6),
            engine=EngineConfig(max_total_tokens=8192), buffer=BufferConfig(ungrouped_size=1), buffer_path=tmp_path / "buffer.db",
        ) as url,
        RouterClient(url) as admin,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="agent") as client,
    ):  # fmt: skip
        history: list[object] = [{"role": "user", "content": "Parcel 12: what is the pickup code?"}]
        for _ in range(3):
            found = await client.chat.completions.create(model="m", messages=history, tools=TOOLS)  # type: ignore[arg-type]
            history += [found.choices[0].message.to_dict(), {"role": "user", "content": "Go on."}]
        (session,) = await admin.sessions()
        await admin.finish(session["session_id"], reward=1.0)
    buffer = await Buffer.open(tmp_path / "buffer.db", BufferConfig(ungrouped_size=1))
    lease = await buffer.lease(num_groups=1, step=0, wait_s=0)
    await buffer.close()
    assert lease is not None
    batch = pack(lease.groups, advantage=AdvantageConfig(), loss=LossConfig(), max_row_tokens=1024).batch
    assert set(np.unique(batch.temperature[batch.loss_mask])) == {np.float32(0.6)}
    with make_learner(MODEL) as learner:
        gap = np.abs(learner.logprobs(batch) - batch.rollout_logprobs)[batch.loss_mask]
    assert batch.num_sampled > 3  # a sampled token for each call at least
    assert gap.max() < 1e-4


async def test_omitted_reasoning_is_counted(tmp_path: Path) -> None:
    thought = said("<think>\nhm\n</think>\n\nfine")
    model = tmp_path / "model"  # whose template drops the reasoning of earlier questions
    shutil.copytree(MODEL, model)
    shutil.copy(GOLDEN / "qwen3_like.jinja", model / "chat_template.jinja")
    async with router(tmp_path, always(thought), config=RouterConfig(reasoning="template"), model=model) as r:
        first = await r.chat()
        answer = first.json()["choices"][0]["message"]
        omitted = {"role": "assistant", "content": answer["content"]}
        await r.chat([*USER, omitted, {"role": "user", "content": "Go on."}])
        counted = (await r.http.get("/metrics")).text
        origins = [(call["origin"], call["reason"]) for call in await r.calls(first)]
    assert origins == [("fresh", "first"), ("fresh", "reasoning_dropped")]
    assert 'rlagent_calls_total{kind="fresh:reasoning_dropped"} 1' in counted


async def test_a_torn_tail_is_dropped(tmp_path: Path) -> None:
    """A crash may leave the log's last commit half on disk: what was whole before it is there, and nothing of it."""
    buffer = await Buffer.open(tmp_path / "whole.db", BufferConfig())
    await buffer.open_session(Session(session_id="kept", key_hash="kept"))
    log = tmp_path / "whole.db-wal"
    whole = log.stat().st_size
    await buffer.open_session(Session(session_id="torn", key_hash="torn", metadata={"long": "x" * 20_000}))
    assert log.stat().st_size > whole
    for name in ("whole.db", "whole.db-wal"):
        shutil.copy(tmp_path / name, tmp_path / name.replace("whole", "torn"))
    half = whole + (log.stat().st_size - whole) // 2
    await buffer.close()
    with (tmp_path / "torn.db-wal").open("r+b") as file:
        file.truncate(half)
    found = await Buffer.open(tmp_path / "torn.db", BufferConfig())
    assert await found.session("kept") is not None
    assert await found.session("torn") is None
    await found.close()
