"""The embedded engine against transformers' batched `generate`: 32 requests of log-normal output lengths.

python benchmarks/engine.py [--threads 1] [--rounds 2] [--sizes 1M]
Same random Qwen3 models, same prompts, same machine. `generate` decodes the whole batch (left-padded) until its longest
request is done; useful tokens are those that were asked for. The engine is asked through its thread, as its HTTP
server does. The two take turns, and each one's fastest round counts; processor seconds are those of the whole process,
which other processes disturb less than the clock.
"""

import argparse
import asyncio
import logging
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import machine
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlagent.engine.config import EngineConfig
from rlagent.engine.loop import Engine
from rlagent.engine.requests import GenerateRequest
from rlagent.engine.sequence import Progress

NUM_REQUESTS = 32
SIZES = {  # name -> layers, hidden, intermediate, heads, vocabulary
    "1M": (4, 128, 384, 4, 704),
    "45M": (12, 512, 1536, 8, 8192),
}


@dataclass(frozen=True, slots=True)
class Spent:
    """What one round took."""

    wall_s: float
    cpu_s: float


class Stopwatch:
    """Measures from its making on."""

    def __init__(self) -> None:
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()

    def spent(self) -> Spent:
        return Spent(time.perf_counter() - self._wall_s, time.process_time() - self._cpu_s)


def fastest(rounds: list[Spent]) -> Spent:
    """The least of each figure."""
    return Spent(min(r.wall_s for r in rounds), min(r.cpu_s for r in rounds))


def make_model(directory: Path, size: str) -> Qwen3ForCausalLM:
    """A random checkpoint of about that size."""
    layers, hidden, intermediate, heads, vocab = SIZES[size]
    config = Qwen3Config(
        num_hidden_layers=layers, hidden_size=hidden, intermediate_size=intermediate, num_attention_heads=heads,
        num_key_value_heads=heads // 2, head_dim=hidden // heads, vocab_size=vocab, max_position_embeddings=2048,
        tie_word_embeddings=True, eos_token_id=1, pad_token_id=0, initializer_range=0.08,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(directory)
    return model


def requests(vocab: int) -> tuple[list[list[int]], list[int]]:
    """Prompts of 32 to 128 tokens, and output lengths: log-normal, median 64, at most 512."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, vocab, int(n)).tolist() for n in rng.integers(32, 129, NUM_REQUESTS)]
    lengths = np.clip(np.exp(rng.normal(np.log(64), 1.0, NUM_REQUESTS)), 8, 512).astype(int).tolist()
    return prompts, lengths


async def run_engine(directory: Path, prompts: list[list[int]], lengths: list[int], threads: int) -> Spent:
    """For all requests; a first pass warms up."""
    engine = Engine.load(EngineConfig(threads=threads, max_running=NUM_REQUESTS), directory, "0")
    engine.start()
    loop = asyncio.get_running_loop()

    async def ask(prompt: list[int], length: int) -> None:
        done = asyncio.Event()

        def emit(_: Progress) -> None:
            loop.call_soon_threadsafe(done.set)

        body = {
            "input_ids": prompt,
            "return_logprob": True,
            "sampling_params": {"max_new_tokens": length, "ignore_eos": True},
        }
        engine.submit(GenerateRequest.parse(body, engine).sequences(emit)[0])
        await done.wait()

    passes = []
    for _ in range(2):
        await engine.call(engine.flush_cache)
        watch = Stopwatch()
        await asyncio.gather(*(ask(p, n) for p, n in zip(prompts, lengths, strict=True)))
        passes.append(watch.spent())
    engine.close()
    return passes[-1]


def run_generate(model: Qwen3ForCausalLM, prompts: list[list[int]], lengths: list[int], threads: int) -> Spent:
    """For one batched, left-padded `generate` for the longest request."""
    torch.set_num_threads(threads)
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    options: dict[str, Any] = {"do_sample": True, "top_k": 0, "top_p": 1.0, "eos_token_id": None, "use_cache": True}
    model.generate(ids, attention_mask=mask, max_new_tokens=4, **options)
    watch = Stopwatch()
    model.generate(ids, attention_mask=mask, max_new_tokens=max(lengths), **options)
    return watch.spent()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    columns = (
        "model",
        "threads",
        "useful tokens",
        "generate tokens/s",
        "engine tokens/s",
        "ratio",
        "ratio of processor s",
    )
    print(f"{machine()}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for size in args.sizes:
        with tempfile.TemporaryDirectory() as directory:
            model = make_model(Path(directory), size)
            prompts, lengths = requests(model.config.vocab_size)
            for threads in args.threads:
                theirs, ours = [], []
                for _ in range(args.rounds):
                    theirs.append(run_generate(model, prompts, lengths, threads))
                    ours.append(asyncio.run(run_engine(Path(directory), prompts, lengths, threads)))
                generate, engine, useful = fastest(theirs), fastest(ours), sum(lengths)
                row = (
                    f"{size} ({model.num_parameters() / 1e6:.1f}M)", threads, useful, round(useful / generate.wall_s),
                    round(useful / engine.wall_s), f"{generate.wall_s / engine.wall_s:.1f}", f"{generate.cpu_s / engine.cpu_s:.1f}",
                )  # fmt: skip
                print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
