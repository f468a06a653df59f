"""The cookbook's pages do what they say: their code, run in an empty directory."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def saved(page: str, directory: Path) -> str:
    """Save the page's Python files, each named just before its block; the page's text."""
    text = (DOCS / page).read_text()
    for name, code in re.findall(r"`(\w+\.py)`[^`\n]*:\n\n```python\n(.*?)```", text, re.DOTALL):
        (directory / name).write_text(code)
    return text


def run(directory: Path, *arguments: str) -> str:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(DOCS.parent), str(directory)])}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


pytestmark = pytest.mark.slow


def test_the_verifiers_of_the_page_give_its_rewards(tmp_path: Path) -> None:
    page = saved("write_a_verifier.md", tmp_path)
    for line in run(tmp_path, "verify.py").splitlines():
        assert line in page


def test_the_environment_of_the_page_passes_its_test(tmp_path: Path) -> None:
    saved("write_an_environment.md", tmp_path)
    assert "1 passed" in run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_lamp.py")


def test_the_agent_of_the_page_can_be_loaded(tmp_path: Path) -> None:
    saved("train_my_own_agent.md", tmp_path)
    run(tmp_path, "make_tasks.py")
    assert len((tmp_path / "train.jsonl").read_text().splitlines()) == 200
    code = "from rlagent.loading import load_function; load_function('my_rollout.py:rollout', what='rollout function')"
    run(tmp_path, "-c", code)
