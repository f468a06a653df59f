"""When a sequence ends, and the text that is served."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from rlagent.engine.sampling import SamplingParams
from rlagent.engine.stops import Stop, find_stop, served_text

TOKENIZER = Tokenizer.from_file(str(Path(__file__).parents[2] / "examples" / "parcels" / "model" / "tokenizer.json"))
PROMPT = TOKENIZER.encode("prompt END").ids
EOS = frozenset({697})


def run(output: list[int], *, context: int = 1000, **given: Any) -> tuple[int, Stop | None]:
    """Token by token: after how many the sequence ended, and why."""
    params = SamplingParams.parse({"max_new_tokens": 1000, **given})
    for count in range(1, len(output) + 1):
        stop = find_stop(PROMPT + output[:count], count, params, EOS, TOKENIZER, context)
        if stop is not None:
            return count, stop
    return len(output), None


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def test_length_stop_ids_and_end_of_sequence() -> None:
    assert run([5, 6, 7, 8], max_new_tokens=3) == (3, Stop("length", 3))
    assert run([5, 6, 7, 8], context=len(PROMPT) + 2) == (2, Stop("length", 2))
    assert run([5, 697, 7]) == (2, Stop("stop", 697))
    assert run([5, 697, 7], ignore_eos=True) == (3, None)
    assert run([5, 697, 7], ignore_eos=True, stop_token_ids=[7, 697]) == (3, None)
    assert run([5, 7, 6, 7], stop_token_ids=[7], min_new_tokens=3) == (4, Stop("stop", 7))
    assert run([5, 697], max_new_tokens=2) == (2, Stop("stop", 697))  # both: it ended by itself


def test_the_prompt_never_stops_anything() -> None:
    assert run(ids_of(" and on"), stop="END") == (len(ids_of(" and on")), None)
    assert run(ids_of("D and on"), stop="DD") == (len(ids_of("D and on")), None)


@given(
    before=st.text(max_size=20), stop=st.text(min_size=1, max_size=8), after=st.text(max_size=8), special=st.booleans()
)
@settings(deadline=None, max_examples=200)
def test_a_stop_string_is_found_at_the_token_that_completes_it(
    before: str, stop: str, after: str, special: bool
) -> None:
    output = ids_of(before) + ([696] if special else []) + ids_of(stop + after)
    text = TOKENIZER.decode(output, skip_special_tokens=False)
    count, found = run(output, stop=[stop], ignore_eos=True)
    decoded = [TOKENIZER.decode(output[:end], skip_special_tokens=False) for end in range(1, len(output) + 1)]
    first = next((end for end, part in enumerate(decoded, 1) if stop in part), None)
    if stop not in text:  # the tokenizer does not keep this text
        assert found is None
    else:
        assert (count, found) == (first, Stop("stop", stop))


def test_the_served_text() -> None:
    output = ids_of("Hello END of it")
    whole = SamplingParams.parse({"stop": "END"})
    kept = SamplingParams.parse({"stop": "END", "no_stop_trim": True})
    stop = Stop("stop", "END")
    assert served_text(output, stop, whole, TOKENIZER) == "Hello "
    assert served_text(output, stop, kept, TOKENIZER) == "Hello END"
    assert served_text(output, None, whole, TOKENIZER) == "Hello END of it"
    assert served_text(output, Stop("abort", "END"), whole, TOKENIZER) == "Hello END of it"
    by_id = Stop("stop", output[-1])
    assert served_text(output, by_id, whole, TOKENIZER) == TOKENIZER.decode(output[:-1])
    assert served_text(output, by_id, kept, TOKENIZER) == "Hello END of it"


def test_special_tokens_are_shown_when_asked_for() -> None:
    output = [*ids_of("a"), 696]
    for skip, expected in ((True, "a"), (False, "a<|im_start|>")):
        params = SamplingParams.parse({"skip_special_tokens": skip})
        assert served_text(output, None, params, TOKENIZER) == expected


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (Stop("stop", 7), {"type": "stop", "matched": 7}),
        (Stop("stop", "x"), {"type": "stop", "matched": "x"}),
        (Stop("length", 9), {"type": "length", "length": 9}),
        (Stop("abort", "why"), {"type": "abort", "message": "why"}),
    ],
)
def test_the_finish_reason_on_the_wire(stop: Stop, expected: dict[str, Any]) -> None:
    assert stop.to_json() == expected
