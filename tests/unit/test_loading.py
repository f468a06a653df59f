"""Loading a user's function: each way it goes wrong has its own message."""

import sys
from pathlib import Path

import pytest

from rlagent.errors import LoadError
from rlagent.loading import load_function


@pytest.fixture
def clean_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """What loading adds to the search path is gone after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))


pytestmark = pytest.mark.usefixtures("clean_imports")


def test_a_file_relative_to_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agent.py").write_text("def act():\n    return 7\n")
    monkeypatch.chdir(tmp_path)
    assert load_function("agent.py:act", what="rollout function")() == 7


def test_a_module() -> None:
    assert load_function("os.path:join", what="loss")("a", "b") == "a/b"


def test_a_file_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "my_neighbour_of_loading.py").write_text("VALUE = 3\n")
    (tmp_path / "uses.py").write_text("from my_neighbour_of_loading import VALUE\ndef get():\n    return VALUE\n")
    assert load_function(f"{tmp_path}/uses.py:get", what="loss")() == 3


def test_two_files_of_one_name_are_two_modules_and_a_file_is_loaded_once(tmp_path: Path) -> None:
    for name, value in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same.py").write_text(f"def get():\n    return {value}\n")
    a, b = (load_function(f"{tmp_path}/{name}/same.py:get", what="loss") for name in "ab")
    assert (a(), b()) == (1, 2)
    assert load_function(f"{tmp_path}/a/same.py:get", what="loss") is a


def test_classes_in_a_loaded_file_can_be_pickled(tmp_path: Path) -> None:
    (tmp_path / "records.py").write_text(
        "import dataclasses, pickle\n@dataclasses.dataclass\nclass R:\n    x: int\n"
        "def copy(x):\n    return pickle.loads(pickle.dumps(R(x))).x\n"
    )
    assert load_function(f"{tmp_path}/records.py:copy", what="loss")(5) == 5


@pytest.mark.parametrize("spec", ["", "agent.py", ":act", "agent.py:", "act"])
def test_a_spec_of_another_form(spec: str) -> None:
    with pytest.raises(LoadError, match=r"rollout function '.*' is not of the form file\.py:function"):
        load_function(spec, what="rollout function")


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"loss: file '.*missing\.py' does not exist"):
        load_function(f"{tmp_path}/missing.py:f", what="loss")


def test_no_such_function_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward_of(x):\n    return x\nVALUE = 1\n")
    with pytest.raises(LoadError, match=r"has no 'reward_off'; did you mean 'reward_of'\?"):
        load_function(f"{tmp_path}/mine.py:reward_off", what="loss")
    with pytest.raises(LoadError, match=r"has no 'zzz'$"):
        load_function(f"{tmp_path}/mine.py:zzz", what="loss")
    with pytest.raises(LoadError, match="'VALUE' is a int, not a function"):
        load_function(f"{tmp_path}/mine.py:VALUE", what="loss")


@pytest.mark.parametrize(("body", "error"), [("1 / 0", "ZeroDivisionError"), ("def f(:", "SyntaxError")])
def test_the_files_own_failure_comes_with_its_traceback(tmp_path: Path, body: str, error: str) -> None:
    (tmp_path / "broken.py").write_text(f"import os\n{body}\n")
    with pytest.raises(LoadError, match="failed while it was imported") as caught:
        load_function(f"{tmp_path}/broken.py:f", what="loss")
    assert error in str(caught.value)
    assert "broken.py" in str(caught.value)
    (tmp_path / "broken.py").write_text("def f():\n    return 1\n")  # mended: nothing of the failure is kept
    assert load_function(f"{tmp_path}/broken.py:f", what="loss")() == 1


def test_a_file_whose_import_is_missing_is_not_called_missing_itself(tmp_path: Path) -> None:
    (tmp_path / "needs.py").write_text("import no_such_package_anywhere\n")
    with pytest.raises(LoadError, match="failed while it was imported") as caught:
        load_function(f"{tmp_path}/needs.py:f", what="loss")
    assert "No module named 'no_such_package_anywhere'" in str(caught.value)


def test_no_such_module_and_a_modules_own_missing_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_such_package_anywhere", "os.no_such_part"):
        with pytest.raises(LoadError, match="there is no module"):
            load_function(f"{name}:f", what="loss")
    (tmp_path / "module_that_needs.py").write_text("import another_package_nowhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(LoadError, match="another_package_nowhere"):
        load_function("module_that_needs:f", what="loss")
