"""The router's overhead a call, against the same engine asked directly: 1, 16 and 64 sessions at once.

python benchmarks/router.py [--calls 400]
Every routed call is rendered, recorded and committed; a direct call is the bare POST /generate with the same prompt ids.
Both ask for 8 tokens.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
from machine import machine
from tokenizers import Tokenizer

from rlagent.client import RouterClient

MODEL = Path(__file__).parents[1] / "examples" / "parcels" / "model"
MESSAGES = [{"role": "user", "content": "What is the pickup code of Mia's parcel?"}]
NUM_TOKENS = 8
Call = Callable[[aiohttp.ClientSession, int], Awaitable[None]]


async def measure(call: Call, sessions: int, calls: int) -> tuple[float, float]:
    """(p50 in ms, calls/s) of `calls` calls from `sessions` loops."""
    times: list[float] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def loop(index: int) -> None:
            for _ in range(calls // sessions):
                start = time.perf_counter()
                await call(http, index)
                times.append(time.perf_counter() - start)

        await asyncio.gather(*(call(http, index) for index in range(sessions)))  # warm up
        times.clear()
        start = time.perf_counter()
        await asyncio.gather(*(loop(index) for index in range(sessions)))
        elapsed_s = time.perf_counter() - start
    return statistics.median(times) * 1e3, len(times) / elapsed_s


async def compare(url: str, calls: int) -> None:
    """Print the table."""
    ids = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode("<|im_start|>user\n" + MESSAGES[0]["content"]).ids
    async with RouterClient(url) as client:
        engine = (await client.policy())["engines"][0]["url"]
        print(
            f"{machine()}\n\n| sessions | direct p50 ms | routed p50 ms | overhead ms | direct calls/s | routed calls/s | ratio |"
        )
        print("|---|---|---|---|---|---|---|")
        for sessions in (1, 16, 64):
            handles = [await client.new_session() for _ in range(sessions)]

            async def direct(http: aiohttp.ClientSession, _: int) -> None:
                body = {
                    "input_ids": ids,
                    "return_logprob": True,
                    "sampling_params": {"max_new_tokens": NUM_TOKENS, "ignore_eos": True},
                }
                async with http.post(f"{engine}/generate", json=body) as response:
                    response.raise_for_status()
                    await response.read()

            async def routed(http: aiohttp.ClientSession, index: int, handles: list = handles) -> None:  # type: ignore[type-arg]
                body = {"model": "policy", "messages": MESSAGES, "max_tokens": NUM_TOKENS}
                headers = {"authorization": f"Bearer {handles[index].api_key}"}
                async with http.post(
                    f"{handles[index].base_url}/chat/completions", json=body, headers=headers
                ) as response:
                    response.raise_for_status()
                    await response.read()

            plain_ms, plain_rate = await measure(direct, sessions, calls)
            routed_ms, routed_rate = await measure(routed, sessions, calls)
            print(
                f"| {sessions} | {plain_ms:.2f} | {routed_ms:.2f} | {routed_ms - plain_ms:.2f} | {plain_rate:.0f} | {routed_rate:.0f} "
                f"| {routed_rate / plain_rate:.2f} |"
            )


def main() -> None:
    """Start a server of its own, measure, stop it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=640)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        command = [
            sys.executable,
            "-m",
            "rlagent.cli",
            "serve",
            "--model",
            str(MODEL),
            "--port",
            "0",
            "--buffer",
            f"{directory}/buffer.db",
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            try:
                asyncio.run(compare(url, args.calls))
            finally:
                server.terminate()


if __name__ == "__main__":
    main()
