"""When a sequence ends: stop ids, stop strings across token borders, length."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import Tokenizer

from rlagent.engine.sampling import SamplingParams

_BYTES_A_TOKEN: Final = 1  # the least a token of text adds: so many last tokens always cover a stop string
_SPARE_TOKENS: Final = (
    4  # more of them: the tail may begin within a character, and ids beyond the tokenizer's have no text
)


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a sequence ended, in SGLang's words."""

    kind: str  # "stop", "length", "abort"
    detail: int | str | None = None

    def to_json(self) -> dict[str, Any]:
        """The `finish_reason` object."""
        if self.kind == "stop":
            return {"type": "stop", "matched": self.detail}
        if self.kind == "length":
            return {"type": "length", "length": self.detail}
        return {"type": "abort", "message": self.detail}


def find_stop(
    ids: Sequence[int], num_output: int, params: SamplingParams, eos_ids: frozenset[int], tokenizer: Tokenizer | None,
    context: int,
) -> Stop | None:  # fmt: skip
    """Whether the newest of `ids` ends the sequence. The last num_output of them were sampled; `context` is the most there may be.

    Asked once a token, so it looks at a tail only.
    """
    newest = ids[-1]
    if num_output >= params.min_new_tokens:
        if not params.ignore_eos and (newest in params.stop_token_ids or newest in eos_ids):  # for both, as SGLang
            return Stop("stop", newest)
        if params.stop and tokenizer is not None:
            matched = _stop_string(ids, num_output, params.stop, tokenizer)
            if matched is not None:
                return Stop("stop", matched)
    if num_output >= params.max_new_tokens or len(ids) >= context:
        return Stop("length", num_output)
    return None


def _stop_string(ids: Sequence[int], num_output: int, stops: Sequence[str], tokenizer: Tokenizer) -> str | None:
    """The first stop string that the newest token completes. Only a tail is decoded that is sure to hold it."""
    longest = max(len(stop.encode()) for stop in stops) // _BYTES_A_TOKEN + _SPARE_TOKENS
    text = tokenizer.decode(list(ids[-min(longest, num_output) :]), skip_special_tokens=False)
    return next((stop for stop in stops if stop in text), None)


def served_text(output: Sequence[int], stop: Stop | None, params: SamplingParams, tokenizer: Tokenizer) -> str:
    """The text of a sequence: without what stopped it, unless no_stop_trim, and never with what a token holds beyond a stop string."""
    matched = stop.detail if stop is not None and stop.kind == "stop" else None
    if isinstance(matched, int) and not params.no_stop_trim:
        output = output[:-1]
    text: str = tokenizer.decode(list(output), skip_special_tokens=params.skip_special_tokens)
    if isinstance(matched, str) and matched in text:
        return text[: text.index(matched) + (len(matched) if params.no_stop_trim else 0)]
    return text
