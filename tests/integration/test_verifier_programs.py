"""Programs of a model, verified in real sandboxes: what passes, what fails, and what only pretends."""

import asyncio
from pathlib import Path

import pytest
from sandbox_backends import TIGHT, needs_bwrap

from rlagent.envs.verifiers import Attempt, Check, Programs, Rubric
from rlagent.sandboxes.process_backend import ProcessBackend

TESTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0\n"
RIGHT = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
PRETENDERS = {
    "leaves before the tests": "import os\ndef add(a, b):\n    os._exit(0)",
    "exits": "raise SystemExit(0)",
    "wrong": "def add(a, b):\n    return a - b",
    "prints": "print('ok')\nimport sys\ndef add(a, b):\n    sys.exit(0)",
    "hangs": "def add(a, b):\n    while True: pass",
    "floods": "print('x' * 10**8)\ndef add(a, b):\n    return a + b",
    "not python": "I would rather not.",
    "nothing": "",
}


@needs_bwrap
@pytest.mark.slow
async def test_only_a_program_that_passes_the_tests_passes(tmp_path: Path) -> None:
    backend = ProcessBackend(limits=TIGHT, state_directory=tmp_path)
    verifier = Programs(tests="tests", backend=backend, max_open=2, program_s=10)
    check = Check(name="tests", verifier=verifier, timeout_s=60)
    async with Rubric([check]) as rubric:
        answers = [RIGHT, *PRETENDERS.values()]
        attempts = [Attempt(task={"tests": TESTS}, answer=answer) for answer in answers]
        found = await asyncio.gather(*(rubric.reward(attempt) for attempt in attempts))
        by_name = dict(zip(["right", *PRETENDERS], found, strict=True))
    assert {name for name, reward in by_name.items() if reward.total == 1.0} == {"right"}
    assert not rubric.failures


@needs_bwrap
@pytest.mark.parametrize(("all_or_nothing", "reward"), [(True, 0.0), (False, 0.5)])
async def test_cases_are_given_and_compared_by_lines(tmp_path: Path, all_or_nothing: bool, reward: float) -> None:
    backend = ProcessBackend(limits=TIGHT, state_directory=tmp_path)
    verifier = Programs(cases="cases", all_or_nothing=all_or_nothing, backend=backend)
    cases = [{"input": "2 3\n", "output": "5"}, {"input": "2 -3\n", "output": "-1\n\n"}]
    try:
        adds = Attempt(task={"cases": cases}, answer="print(sum(map(int, input().split())))  ")
        assert await verifier(adds) == 1.0
        half = Attempt(task={"cases": cases}, answer="```\nprint(sum(abs(int(n)) for n in input().split()))\n```")
        assert await verifier(half) == reward
    finally:
        await verifier.close()
