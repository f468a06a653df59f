"""What docs/ says of the settings is what they are."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_the_page_of_settings_is_current() -> None:
    spec = importlib.util.spec_from_file_location("generate_configuration", DOCS / "generate_configuration.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (DOCS / "configuration.md").read_text() == module.page(), "run: python docs/generate_configuration.py"


@pytest.mark.parametrize("page", [path.name for path in sorted(DOCS.glob("*.md"))])
def test_every_test_that_a_page_names_exists(page: str) -> None:
    for file, name in TEST.findall((DOCS / page).read_text()):
        assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{page}: {file}::{name}"


def test_every_point_of_recording_has_a_test() -> None:
    rows = [line for line in (DOCS / "recording.md").read_text().splitlines() if re.match(r"\| \d", line)]
    points = [int(number) for row in rows for number in re.findall(r"\d+", row.split("|")[1])]
    assert points == list(range(1, 45))
    assert all(TEST.search(row) for row in rows)


def test_every_invariant_of_the_learner_has_a_test() -> None:
    rows = [line for line in (DOCS / "learner.md").read_text().splitlines() if re.match(r"\| \d", line)]
    assert [int(row.split("|")[1]) for row in rows] == list(range(1, 26))
    assert all(TEST.search(row) for row in rows)
