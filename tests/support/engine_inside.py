"""An engine inside the test's own process: its thread, without HTTP."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_models import VOCAB

from rlagent.engine.config import EngineConfig
from rlagent.engine.loop import Engine
from rlagent.engine.requests import GenerateRequest, answer
from rlagent.engine.sequence import Progress, Sequence

Answer = dict[str, Any]


@asynccontextmanager
async def running(directory: Path, **options: Any) -> AsyncIterator[Engine]:
    """A started engine of small limits; ended with the block."""
    small = {"max_running": 8, "max_total_tokens": 4096, "prefill_tokens": 32}
    engine = Engine.load(EngineConfig(**{**small, **options}), directory, "0")
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


async def generate(
    engine: Engine, prompt: list[int], *, asked: dict[str, Any] | None = None, **params: Any
) -> list[Answer]:
    """The n answers to one prompt, as /generate gives them, with logprobs; `asked` goes beside the sampling's params."""
    loop = asyncio.get_running_loop()
    news: asyncio.Queue[Progress] = asyncio.Queue()

    def emit(progress: Progress) -> None:
        loop.call_soon_threadsafe(news.put_nowait, progress)

    sampling = {"max_new_tokens": 20, "ignore_eos": True, **params}
    body = {"input_ids": prompt, "return_logprob": True, "sampling_params": sampling, **(asked or {})}
    request = GenerateRequest.parse(body, engine)
    sequences = request.sequences(emit)
    for sequence in sequences:
        engine.submit(sequence)
    ended: dict[Sequence, Progress] = {}
    while len(ended) < len(sequences):
        progress = await news.get()
        if progress.stop is not None:
            ended[progress.sequence] = progress
    return [answer(request, ended[sequence], engine) for sequence in sequences]


def output_logprobs(found: Answer) -> list[float]:
    """The logprobs of an answer's ids."""
    return [entry[0] for entry in found["meta_info"]["output_token_logprobs"]]


def routed_experts(found: Answer, layers: int, top_k: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The experts [tokens, layers, top_k] of an answer, as SGLang's clients read them."""
    raw = base64.b64decode(found["meta_info"]["routed_experts"])
    return np.frombuffer(raw, np.int32).reshape(-1, layers, top_k)


def oracle(model: Any, prompt: list[int], output: list[int], temperature: float) -> torch.Tensor:
    """transformers' logprobs of `output` after `prompt`."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)


def prompts(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    """Random prompts of these lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(2, VOCAB, n).tolist() for n in lengths]
