"""A teacher's logprobs of recorded rows, from the engine that serves it: what on-policy distillation learns from.

In the flow: the driver asks before a step, and the batch carries the answer to the learner. The engine speaks SGLang's /generate; it
is given ids and gives back one logprob an id. Invariant: what is not a finite logprob of exactly those ids stops the run.
"""

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import numpy as np

from rlagent.errors import EngineError
from rlagent.trainer.config import TeacherConfig
from rlagent.types import Batch, Float32Array


async def with_teacher(batch: Batch, config: TeacherConfig) -> Batch:
    """The batch with teacher_logprobs [N], 0 where nothing was sampled. EngineError when the teacher cannot give them."""
    if not (batch.temperature[batch.loss_mask] == 1).all():
        raise EngineError(
            "a teacher scores at temperature 1, but tokens of this batch were sampled at another; set sampling.temperature = 1.0"
        )
    bounds = list(zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True))
    room = asyncio.Semaphore(config.concurrency)
    async with httpx.AsyncClient(base_url=str(config.url), timeout=config.timeout_s) as client:
        asked = [_row(client, batch.token_ids[start:end].tolist(), room) for start, end in bounds]
        rows = await asyncio.gather(*asked)
    found = np.concatenate(rows) if rows else np.zeros(0, np.float32)
    return replace(batch, teacher_logprobs=np.where(batch.loss_mask, found, np.float32(0)))


async def _row(client: httpx.AsyncClient, ids: list[int], room: asyncio.Semaphore) -> Float32Array:
    """The logprob of each id after those before it; 0 for the first, which has none."""
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    async with room:
        try:
            answer = await client.post("/generate", json=body)
        except httpx.HTTPError as error:
            raise EngineError(
                f"the teacher at {client.base_url} cannot be reached ({error!r}); check learner.teacher.url"
            ) from error
    if answer.status_code != 200:
        raise EngineError(f"the teacher at {client.base_url} answered {answer.status_code}: {answer.text[:500]}")
    return _parse(answer.json(), ids, str(client.base_url))


def _parse(answer: Any, ids: list[int], url: str) -> Float32Array:
    try:
        items = answer["meta_info"]["input_token_logprobs"]
        scored = [int(item[1]) for item in items]
        values = np.array([0.0] + [float(item[0]) for item in items[1:]], dtype=np.float32)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(
            f"the teacher at {url} gave no input_token_logprobs; it must be SGLang's /generate"
        ) from error
    if scored != ids or not np.isfinite(values).all():
        raise EngineError(
            f"the teacher at {url} scored other ids than it was given, or gave a logprob that is not finite"
        )
    return values
