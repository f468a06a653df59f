"""Prometheus text, written by hand: counters of the recorder, gauges of sessions and engines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rlagent.router.balance import Pool
from rlagent.router.live import LiveSessions
from rlagent.types import PolicyVersion

CONTENT_TYPE = "text/plain; version=0.0.4"


def render(counts: Mapping[tuple[str, str], int], live: LiveSessions, pool: Pool, policy: PolicyVersion) -> str:
    """The body of /metrics."""
    lines: list[str] = []
    families: dict[str, list[tuple[str, int]]] = {}
    for (what, which), count in sorted(counts.items()):
        families.setdefault(what, []).append((f'{{kind="{_escape(which)}"}}', count))
    for what, rows in families.items():
        lines += _family(f"rlagent_{what}_total", "counter", rows)
    lines += _family("rlagent_open_sessions", "gauge", [("", len(live))])
    lines += _family("rlagent_policy_version", "gauge", [("", policy.version)])
    engines = [(f'{{engine="{_escape(engine.url)}"}}', engine) for engine in pool.engines]
    lines += _family(
        "rlagent_engine_ready", "gauge", [(label, int(engine.state == "ready")) for label, engine in engines]
    )
    lines += _family("rlagent_engine_running", "gauge", [(label, engine.running) for label, engine in engines])
    return "\n".join(lines) + "\n"


def _family(name: str, kind: str, rows: Iterable[tuple[str, int]]) -> list[str]:
    return [f"# TYPE {name} {kind}", *(f"{name}{label} {value}" for label, value in rows)]


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
