"""The shortest call that a session can hold, for tests of what the data buffer does with sessions."""

import numpy as np

from rlagent.types import Call, Choice, Sampling, VersionSpan


def first_call(session_id: str, *output_ids: int, version: int = 0, trainable: bool = True) -> Call:
    """A session's first call: a prompt of one token, and these sampled tokens (default: one) of a version."""
    ids = output_ids or (5,)
    choice = Choice(
        output_ids=np.array(ids, np.int32),
        logprobs=-1.0 / np.arange(1, len(ids) + 1, dtype=np.float32),
        versions=(VersionSpan(version=version, start=0, end=len(ids)),),
        finish_reason="stop",
        trainable=trainable,
    )
    return Call(
        call_id=f"{session_id}.0", session_id=session_id, index=0, dialect="chat", model="policy", parent=None, origin="fresh",
        reason="first", prompt_suffix=np.array([1], np.int32), prompt_len=1, choices=(choice,), sampling=Sampling(), messages=b"",
        served=b"", started_at=0.0, finished_at=0.0,
    )  # fmt: skip
