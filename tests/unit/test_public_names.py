"""The public names: a change here is a change for users."""

import rlagent


def test_public_names() -> None:
    assert sorted(rlagent.__all__) == ["Reward", "RlagentError", "SessionHandle"]
    for name in rlagent.__all__:
        assert getattr(rlagent, name).__doc__
