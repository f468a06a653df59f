"""The environments of the agents: named by variables, or made where RLAGENT_REQUIRE_AGENTS=1 says that they must be there."""

import os

import pytest


@pytest.fixture(scope="session")
def agents_python() -> str:
    """The python of tests/agents/make_venv.sh, from RLAGENT_AGENTS_PYTHON."""
    return _named("RLAGENT_AGENTS_PYTHON", "tests/agents/make_venv.sh")


@pytest.fixture(scope="session")
def agents_bin() -> str:
    """The folder of tests/agents/make_npm.sh, from RLAGENT_AGENTS_BIN."""
    found = _named("RLAGENT_AGENTS_BIN", "tests/agents/make_npm.sh")
    if found == "none":  # said by .ci/run
        pytest.skip("the npm index could not be reached")
    return found


def _named(variable: str, script: str) -> str:
    found = os.environ.get(variable)
    if not found:
        why = f"{variable} is not set: give it what {script} prints"
        if os.environ.get("RLAGENT_REQUIRE_AGENTS") == "1":
            pytest.fail(why)
        pytest.skip(why)
    return found
