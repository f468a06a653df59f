"""Any split of what a model wrote gives the same message, and the streamed events joined are that message."""

from __future__ import annotations

import itertools
from typing import Any

from family_outputs import CALLS, MALFORMED, parser_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rlagent.router.conversation import ToolCall
from rlagent.router.families import FORMS
from rlagent.router.parse import Text, Thought

_MARKS = [form.opens for form in FORMS.values()] + [form.closes for form in FORMS.values()]
_PIECES = [
    *filter(None, _MARKS), "<think>", "</think>", "[THINK]", "[/THINK]", "<|channel|>analysis<|message|>", "<|end|>",
    "<|start|>assistant", "<|channel|>final<|message|>", '{"name": "f", ', '"parameters": {}}', " ", "\n", "<", "[", "a", ";",
    *(text for _, text, _, _ in CALLS), *(text for _, text in MALFORMED),
]  # fmt: skip
written = st.lists(st.sampled_from(_PIECES), max_size=6).map("".join)


@given(st.sampled_from(sorted(FORMS)), written, st.lists(st.integers(1, 7), min_size=1, max_size=6), st.booleans())
@settings(max_examples=500, deadline=None)
def test_any_split_reads_the_same(family: str, text: str, sizes: list[int], tools: bool) -> None:
    whole = parser_of(family, itertools.count(), tools=tools)
    at_once = [*whole.feed(text), *whole.finish()]
    split = parser_of(family, itertools.count(), tools=tools)
    events: list[Any] = []
    at = 0
    for size in itertools.cycle(sizes):
        if at >= len(text):
            break
        events += split.feed(text[at : at + size])
        at += size
    events += split.finish()
    assert (split.message, split.status) == (whole.message, whole.status)
    for found in (at_once, events):
        assert "".join(event.text for event in found if isinstance(event, Text)) == whole.message.content
        assert "".join(event.text for event in found if isinstance(event, Thought)) == whole.message.reasoning
        assert tuple(event for event in found if isinstance(event, ToolCall)) == whole.message.tool_calls
