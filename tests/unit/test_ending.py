"""How a command ends: in plain words and with an exit code, and with a traceback only for our own bugs."""

import pytest

from rlagent.ending import plain_errors
from rlagent.errors import ConfigError, EngineError, Terminated


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("a = 1: set b"), 1, ["error ConfigError: a = 1: set b"]),
        (
            ExceptionGroup("two", [ConfigError("first"), ExceptionGroup("inner", [EngineError("second")])]),
            1,
            ["error ConfigError: first", "error EngineError: second"],
        ),
        (Terminated("after step 3"), 143, ["after step 3"]),
    ],
)
def test_what_a_user_can_mend_is_said_in_plain_words(
    error: Exception, code: int, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, plain_errors():
        raise error
    assert ended.value.code == code
    assert capsys.readouterr().err.splitlines() == said


def test_our_own_bugs_keep_their_traceback() -> None:
    with pytest.raises(BaseExceptionGroup), plain_errors():
        raise ExceptionGroup("both", [KeyError("ours")])
    with pytest.raises(KeyError), plain_errors():
        raise KeyError("ours")
