"""Process sandboxes against bare bubblewrap: started, used once and closed.

python benchmarks/sandboxes.py [--count 1000] [--alive 200] [--workers 4] [--rounds 10]   (the full run: --count 5000 --alive 1000)
`bare` is `bwrap` with the sandbox's own namespaces and mounts around `true`, started by the same event loop. `sandbox` is open, exec,
close; `pool` forks a prepared filesystem for each, and so does `alive`, which opens all of --alive first, then uses each once, then
closes them. The first three take turns in rounds, and each part of `alive` stands beside as many bare ones, because the machine may be
shared: the ratios are of seconds in the same run, and of processor time (ours and of what we started), which moves less.
"""

import argparse
import asyncio
import resource
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from machine import machine

from rlagent.errors import SandboxError
from rlagent.sandboxes import bubblewrap
from rlagent.sandboxes.base import Sandbox
from rlagent.sandboxes.pool import SandboxPool
from rlagent.sandboxes.process_backend import ProcessBackend


@dataclass(slots=True)
class Cost:
    """Of `number` of them, with the bare ones beside which they were measured."""

    number: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0

    async def spread(self, count: int, workers: int, one: Callable[[], Awaitable[None]]) -> None:
        """Add `count` of them, `workers` at once."""
        wall, cpu = time.perf_counter(), _cpu_s()
        left = iter(range(count))

        async def work() -> None:
            for _ in left:
                await one()

        await asyncio.gather(*(work() for _ in range(workers)))
        self.number += count
        self.wall_s += time.perf_counter() - wall
        self.cpu_s += _cpu_s() - cpu


def _cpu_s() -> float:
    both = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(used.ru_utime + used.ru_stime for used in both)


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


async def measure(home: Path, arguments: argparse.Namespace) -> dict[str, tuple[Cost, Cost]]:
    """What -> its cost, and that of the bare ones beside it."""
    workers, alive = arguments.workers, arguments.alive
    bares, singles, forks = Cost(), Cost(), Cost()
    async with ProcessBackend() as backend, SandboxPool(backend, max_open=max(alive, workers) + 1) as pool:

        async def single() -> None:
            async with await backend.open() as sandbox:
                await use(sandbox)

        async def prepare(sandbox: Sandbox) -> None:
            await sandbox.write("data", b"x" * 1_000_000)

        async def pooled() -> None:
            async with pool.sandbox("data", prepare) as sandbox:
                await use(sandbox)

        for _ in range(arguments.rounds):
            share = arguments.count // arguments.rounds
            await bares.spread(share, workers, lambda: bare(home))
            await singles.spread(share, workers, single)
            await forks.spread(share, workers, pooled)
        async with AsyncExitStack() as stack:
            boxes: list[Sandbox] = []

            async def opened() -> None:
                boxes.append(await stack.enter_async_context(pool.sandbox("data", prepare)))

            at_once, beside = Cost(), Cost()
            await at_once.spread(alive, workers, opened)
            waiting = iter(boxes)
            for _ in range(arguments.rounds):
                await beside.spread(alive // arguments.rounds, workers, lambda: bare(home))
                await at_once.spread(alive // arguments.rounds, workers, lambda: use(next(waiting)))
            await at_once.spread(1, 1, stack.aclose)
        at_once.number = alive
        print(dict(backend.enforced))
    return {
        "bare bwrap": (bares, bares), "sandbox": (singles, bares), "pool, forks": (forks, bares),
        "pool, all alive at once": (at_once, beside),
    }  # fmt: skip


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--alive", type=int, default=200)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        for name in ("work", "tmp", "shm"):
            Path(directory, name).mkdir()
        rows = asyncio.run(measure(Path(directory), arguments))
    print(machine())
    print("| what | number | s | ms each | against bare | CPU ms each | against bare |")
    print("|---|---|---|---|---|---|---|")
    for name, (cost, beside) in rows.items():
        wall, cpu = 1000 * cost.wall_s / cost.number, 1000 * cost.cpu_s / cost.number
        ratios = wall / (1000 * beside.wall_s / beside.number), cpu / (1000 * beside.cpu_s / beside.number)
        print(
            f"| {name} | {cost.number} | {cost.wall_s:.1f} | {wall:.2f} | {ratios[0]:.2f} | {cpu:.2f} | {ratios[1]:.2f} |"
        )


if __name__ == "__main__":
    main()
