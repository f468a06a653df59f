"""The router against the engine asked directly and against the LiteLLM proxy, all before the same fake upstream.

python benchmarks/router.py [--litellm-python PYTHON | --no-litellm] [--parts load sessions long] [--realtime]
  load      conversations of 8 turns that begin with 2,000 tokens (12 kB bodies), one agent and 64 agents; and 64 of whose
            conversations eight begin alike, as rollouts of one task do
  sessions  2,000 open sessions at once, again and again: resident memory
  long      conversations of 50 turns up to 64,000 tokens: what the last turn takes longer than the first
Everything the router answers is rendered, recorded and committed to disk; LiteLLM records nothing. The proxy has a core
to itself. Processor time a call is what other work on the machine disturbs least; --realtime (root) keeps it away.
Without --litellm-python an environment is made by make_litellm_venv.sh.
"""

import argparse
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from machine import machine
from proxies import HERE, Agents, Cores, Server, agents, litellm, model_with_long_context, rlagent, upstream

TURNS, FIRST_TOKENS, TURN_TOKENS = 8, 2000, 40
LONG_TURNS, LONG_TOKENS = 50, 64_000
OPEN_SESSIONS = 2000
GROUP = 8  # rollouts of one task
Proxy = Callable[[str, Path, Cores], AbstractContextManager[Server]]


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one load: latencies in ms, calls/s, and the proxy's own processor ms a call."""

    p50_ms: float
    p99_ms: float
    rate: float
    cpu_ms: float


def measure(who: Agents, server: Server | None, clients: int, calls: int, group: int = 1) -> Measured:
    """Conversations enough for so many calls; so many begin with the same words."""
    count = max(clients, calls // TURNS)
    who.do("new", count=count, first_tokens=FIRST_TOKENS, turn_tokens=TURN_TOKENS, group=group)
    before = 0.0 if server is None else server.cpu_s()
    found = who.do("turns", clients=clients, turns=TURNS)
    cpu_s = 0.0 if server is None else server.cpu_s() - before
    seconds = sorted(one for turn in found["seconds"] for one in turn)
    count = len(seconds)
    return Measured(
        statistics.median(seconds) * 1e3, seconds[count * 99 // 100] * 1e3, count / found["elapsed_s"],
        cpu_s / count * 1e3,
    )  # fmt: skip


def best(rounds: list[Measured]) -> Measured:
    """The least disturbed round of each figure."""
    return Measured(
        min(one.p50_ms for one in rounds), min(one.p99_ms for one in rounds), max(one.rate for one in rounds),
        min(one.cpu_ms for one in rounds),
    )  # fmt: skip


def load(model: Path, proxies: dict[str, Proxy], cores: Cores, args: argparse.Namespace) -> None:
    """One table for each number of agents and delay of the upstream."""
    columns = ["who", "p50 ms", "p99 ms", "over direct ms", "calls/s", "processor ms a call", "calls/s a core"]
    for delay_ms, clients, group in ((0.0, 1, 1), (0.0, 64, 1), (0.0, 64, GROUP), (args.delay_ms, 64, 1)):
        same = "" if group == 1 else f", {group} conversations begin alike"
        print(f"\nload: {clients} agents, upstream answers after about {delay_ms:.0f} ms, stream={args.stream}{same}\n")
        print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
        rounds: dict[str, list[Measured]] = {name: [] for name in ("direct", *proxies)}
        with tempfile.TemporaryDirectory() as directory, upstream(model, cores, delay_ms) as engine:
            for name, proxy in proxies.items():
                with proxy(engine, Path(directory), cores) as server:
                    with _warm(server.url, model, cores, clients, stream=args.stream) as who:
                        calls = args.calls if name == "rlagent" else args.calls // 4
                        rounds[name] += [measure(who, server, clients, calls, group) for _ in range(args.rounds)]
                    with _warm(engine, model, cores, clients, stream=args.stream) as who:
                        rounds["direct"] += [measure(who, None, clients, args.calls, group) for _ in range(args.rounds)]
        direct = best(rounds["direct"])
        for name, found in rounds.items():
            one = best(found)
            cpu = ("", "") if name == "direct" else (f"{one.cpu_ms:.2f}", f"{1e3 / one.cpu_ms:.0f}")
            row = (
                name, f"{one.p50_ms:.2f}", f"{one.p99_ms:.2f}", f"{one.p50_ms - direct.p50_ms:.2f}", f"{one.rate:.0f}",
                *cpu,
            )  # fmt: skip
            print(f"| {' | '.join(row)} |", flush=True)
        if "LiteLLM" in rounds:
            ours, theirs = best(rounds["rlagent"]), best(rounds["LiteLLM"])
            overhead = (theirs.p50_ms - direct.p50_ms) / (ours.p50_ms - direct.p50_ms)
            print(
                f"\nLiteLLM / rlagent: calls/s 1/{ours.rate / theirs.rate:.1f}, overhead {overhead:.1f}, "
                f"processor time {theirs.cpu_ms / ours.cpu_ms:.1f}"
            )


@contextmanager
def _warm(url: str, model: Path, cores: Cores, clients: int, *, stream: bool) -> Iterator[Agents]:
    with agents(url, model, cores, stream=stream) as who:
        who.do("new", count=min(clients, 8), first_tokens=100, turn_tokens=TURN_TOKENS)
        who.do("turns", clients=8, turns=TURNS)
        yield who


def sessions(model: Path, cores: Cores, args: argparse.Namespace) -> None:
    """Resident memory while 2,000 sessions are open, for several generations of them."""
    print(f"\nsessions: {args.sessions} open at once, 3 turns each, then finished\n")
    print("| generation | MiB before | after turn 1 | after turn 2 | after turn 3 | all finished |\n|" + "---|" * 6)
    with (
        tempfile.TemporaryDirectory() as directory,
        upstream(model, cores, 0.0) as engine,
        rlagent(model, engine, Path(directory), cores) as server,
        agents(server.url, model, cores) as who,
    ):
        for generation in range(1, args.generations + 1):
            held = [server.rss_mib()]
            who.do("new", count=args.sessions, first_tokens=FIRST_TOKENS, turn_tokens=TURN_TOKENS)
            for _ in range(3):
                who.do("turns", clients=64, turns=1)
                held.append(server.rss_mib())
            who.do("finish")
            held.append(server.rss_mib())
            print(f"| {generation} | {' | '.join(f'{mib:.0f}' for mib in held)} |", flush=True)


def long(model: Path, cores: Cores, args: argparse.Namespace) -> None:
    """Turn 1 against turn 50, median over conversations; the same requests to the engine directly stand beside."""
    each = LONG_TOKENS // LONG_TURNS
    print(f"\nlong: {LONG_TURNS} turns of {each} new tokens, {args.conversations} conversations, one agent\n")
    print(
        "| who | turn 2 ms | turn 10 ms | turn 25 ms | turn 50 ms | turn 50 - turn 1 ms | turn 1 ms |\n|" + "---|" * 7
    )
    with (
        tempfile.TemporaryDirectory() as directory,
        upstream(model, cores, 0.0) as engine,
        rlagent(model, engine, Path(directory), cores) as server,
    ):
        for name, url in (("direct", engine), ("rlagent", server.url)):
            with agents(url, model, cores) as who:
                who.do("new", count=args.conversations, first_tokens=each - 40, turn_tokens=each - 40)
                found = who.do("turns", clients=1, turns=LONG_TURNS)["seconds"]
            ms = [statistics.median(turn) * 1e3 for turn in found]
            shown = [ms[1], ms[9], ms[24], ms[49], ms[49] - ms[0], ms[0]]
            print(f"| {name} | {' | '.join(f'{one:.2f}' for one in shown)} |", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", nargs="+", choices=("load", "sessions", "long"), default=["load", "sessions", "long"]
    )
    parser.add_argument("--litellm-python", type=Path)
    parser.add_argument("--no-litellm", action="store_true")
    parser.add_argument("--realtime", action="store_true")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--calls", type=int, default=1600, help="of each round; a quarter of it for LiteLLM")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--delay-ms", type=float, default=200.0, help="of the upstream in the third load")
    parser.add_argument("--sessions", type=int, default=OPEN_SESSIONS)
    parser.add_argument("--generations", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=5)
    args = parser.parse_args()
    cores = Cores.split(realtime=args.realtime)
    proxies: dict[str, Proxy] = {}
    print(machine())
    with tempfile.TemporaryDirectory() as directory:
        model = model_with_long_context(Path(directory))
        proxies["rlagent"] = lambda engine, where, cores: rlagent(model, engine, where, cores)
        if "load" in args.parts and not args.no_litellm:
            python = args.litellm_python or _litellm_python()
            proxies["LiteLLM"] = lambda engine, where, cores: litellm(python, engine, where, cores)
        if "load" in args.parts:
            load(model, proxies, cores, args)
        if "sessions" in args.parts:
            sessions(model, cores, args)
        if "long" in args.parts:
            long(model, cores, args)


def _litellm_python() -> Path:
    made = subprocess.run([HERE / "make_litellm_venv.sh"], stdout=subprocess.PIPE, text=True, check=True)
    return Path(made.stdout.strip())


if __name__ == "__main__":
    main()
