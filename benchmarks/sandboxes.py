"""Process sandboxes against bare bubblewrap: started, used once and closed.

python benchmarks/sandboxes.py [--count 1000] [--alive 200] [--workers 4]   (the full run: --count 5000 --alive 1000)
`bare` is `bwrap` with the sandbox's own namespaces and mounts around `true`, started by the same event loop. `sandbox` is open, exec,
close; `pool` forks a prepared filesystem for each; `alive` opens all of --alive first, then uses each once, then closes them.
The default is small because the machine may be shared; the ratio is of seconds in the same run.
"""

import argparse
import asyncio
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

from machine import machine

from rlagent.errors import SandboxError
from rlagent.sandboxes import bubblewrap
from rlagent.sandboxes.base import Sandbox
from rlagent.sandboxes.pool import SandboxPool
from rlagent.sandboxes.process_backend import ProcessBackend


async def spread(count: int, workers: int, one: Callable[[], Awaitable[None]]) -> float:
    """Seconds for `count` of them, `workers` at once."""
    began = time.perf_counter()
    left = iter(range(count))

    async def work() -> None:
        for _ in left:
            await one()

    await asyncio.gather(*(work() for _ in range(workers)))
    return time.perf_counter() - began


async def bare(home: Path) -> None:
    """What the sandbox does, without its limits, directories and output."""
    found = shutil.which("bwrap")
    assert found is not None
    line = bubblewrap.command(
        found, ["true"], home=home, cwd=Path(), env={}, network=False, readable=(), status_fd=2, held_by=0
    )
    process = await asyncio.create_subprocess_exec(
        *line, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    assert await process.wait() == 0


async def use(sandbox: Sandbox) -> None:
    """One command."""
    done = await sandbox.exec(["true"])
    if not done.ok:
        raise SandboxError(f"a benchmark command failed: {done}")


async def measure(home: Path, count: int, alive: int, workers: int) -> list[tuple[str, int, float]]:
    """(what, how many, seconds) of each."""
    rows = [("bare bwrap", count, await spread(count, workers, lambda: bare(home)))]
    async with ProcessBackend() as backend:

        async def single() -> None:
            async with await backend.open() as sandbox:
                await use(sandbox)

        rows.append(("sandbox", count, await spread(count, workers, single)))
        async with SandboxPool(backend, max_open=max(alive, workers) + 1) as pool:

            async def prepare(sandbox: Sandbox) -> None:
                await sandbox.write("data", b"x" * 1_000_000)

            async def pooled() -> None:
                async with pool.sandbox("data", prepare) as sandbox:
                    await use(sandbox)

            rows.append(("pool, forks", count, await spread(count, workers, pooled)))
            async with AsyncExitStack() as stack:
                boxes: list[Sandbox] = []

                async def opened() -> None:
                    boxes.append(await stack.enter_async_context(pool.sandbox("data", prepare)))

                rows.append(("alive: open", alive, await spread(alive, workers, opened)))
                waiting = iter(boxes)
                rows.append(("alive: use", alive, await spread(alive, workers, lambda: use(next(waiting)))))
                began = time.perf_counter()
            rows.append(("alive: close", alive, time.perf_counter() - began))
        print(dict(backend.enforced))
    return rows


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--alive", type=int, default=200)
    parser.add_argument("--workers", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        for name in ("work", "tmp", "shm"):
            Path(directory, name).mkdir()
        rows = asyncio.run(measure(Path(directory), arguments.count, arguments.alive, arguments.workers))
    print(machine())
    print("| what | number | s | ms each | against bare |")
    print("|---|---|---|---|---|")
    base = rows[0][2] / rows[0][1]
    for name, number, seconds in rows:
        print(f"| {name} | {number} | {seconds:.1f} | {1000 * seconds / number:.2f} | {seconds / number / base:.2f} |")


if __name__ == "__main__":
    main()
