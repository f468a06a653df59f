"""When a sequence ends: stop ids, stop strings across token borders, length."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import Tokenizer

from rlagent.engine.sampling import SamplingParams

_BYTES_A_TOKEN: Final = 1  # the least a token can add: so many last tokens always cover a stop string


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
    output: Sequence[int], params: SamplingParams, eos_ids: frozenset[int], tokenizer: Tokenizer | None, room: int
) -> Stop | None:
    """Whether the newest token of `output` ends the sequence. `room` is how many more tokens the context holds."""
    newest = output[-1]
    if len(output) >= params.min_new_tokens:
        if newest in params.stop_token_ids or (newest in eos_ids and not params.ignore_eos):
            return Stop("stop", newest)
        if params.stop and tokenizer is not None:
            matched = _stop_string(output, params.stop, tokenizer)
            if matched is not None:
                return Stop("stop", matched)
    if len(output) >= params.max_new_tokens or room <= 0:
        return Stop("length", len(output))
    return None


def _stop_string(output: Sequence[int], stops: Sequence[str], tokenizer: Tokenizer) -> str | None:
    """The first stop string that the newest token completes. Only a tail is decoded that is sure to hold it."""
    longest = max(len(stop.encode()) for stop in stops) // _BYTES_A_TOKEN + 4
    text = tokenizer.decode(list(output[-longest:]), skip_special_tokens=False)
    return next((stop for stop in stops if stop in text), None)


def trim_stop(text: str, stop: Stop, params: SamplingParams) -> str:
    """The served text: without the stop string, unless no_stop_trim."""
    if isinstance(stop.detail, str) and stop.kind == "stop" and not params.no_stop_trim:
        return text.partition(stop.detail)[0]
    return text
