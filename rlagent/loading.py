"""Loading a function that a user names: `file.py:function`, or `package.module:function`.

It tells apart what users mix up: the file is not there, the function is not in it, or the file's own import failed.
"""

import difflib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rlagent.errors import LoadError


def load_function(spec: str, *, what: str) -> Callable[..., Any]:
    """Load `file.py:function` (relative to the current directory) or `module:function`. LoadError says what to mend.

    what: how messages call it, e.g. "rollout function".
    """
    source, colon, name = spec.rpartition(":")
    if not colon or not source or not name:
        raise LoadError(f"{what} {spec!r} is not of the form file.py:function or package.module:function")
    module = _load_file(Path(source), what) if source.endswith(".py") else _load_module(source, what)
    found = getattr(module, name, None)
    if found is None:
        close = difflib.get_close_matches(name, [n for n in vars(module) if not n.startswith("_")], n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise LoadError(f"{what} {spec!r}: {source} has no {name!r}{hint}")
    if not callable(found):
        raise LoadError(f"{what} {spec!r}: {name!r} is a {type(found).__name__}, not a function")
    function: Callable[..., Any] = found
    return function


def _load_file(path: Path, what: str) -> ModuleType:
    path = path.absolute()
    if not path.is_file():
        raise LoadError(f"{what}: file {str(path)!r} does not exist")
    directory = str(path.parent)
    if directory not in sys.path:
        sys.path.insert(0, directory)  # the file may import its neighbours, as when it is run itself
    name = f"_rlagent_loaded_{path.stem}_{abs(hash(str(path)))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception):
            raise
        raise LoadError(f"{what}: {str(path)!r} failed while it was imported:\n{traceback.format_exc()}") from error
    return module


def _load_module(name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise LoadError(f"{what}: there is no module {error.name!r}; give file.py:function for a file") from error
        raise LoadError(f"{what}: module {name!r} failed while it was imported:\n{traceback.format_exc()}") from error
    except Exception as error:  # the boundary to the user's code
        raise LoadError(f"{what}: module {name!r} failed while it was imported:\n{traceback.format_exc()}") from error
