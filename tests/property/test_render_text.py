"""Text to ids and back, for any text: nothing is injected, nothing is lost, and pieces are the whole."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from templates import MODEL, Session, renderer, tokenizer, tool, user

from rlagent.router.parse import OutputParser, Text, Thought
from rlagent.router.tokenizer import Detokenizer, Tokenizer

TOKENIZER = Tokenizer.load(MODEL)
SPECIAL = [TOKENIZER.encode(text)[0] for text in ("<|im_end|>", "<|im_start|>", "<|endoftext|>")]
PIECES = [
    "<|im_end|>",
    "<|im_start|>",
    "<|",
    "|>",
    "im_end",
    "\ue000",
    "\ue001",
    "s697",
    "0",
    "t0",
    "ä",
    "日",
    "🙂",
    " ",
    "\n",
    "x",
]
texts = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
MARKUP = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    '{"name": "f", "arguments": {"a": 1}}',
    "{",
    " ",
    "\n",
    "x",
    "<",
    "ab",
]
markup = st.lists(st.sampled_from(MARKUP), max_size=10).map("".join)


@given(texts)
@settings(max_examples=200, deadline=None)
def test_guarded_text_holds_no_special_token_and_comes_back(text: str) -> None:
    guarded = TOKENIZER.guard(text)
    assert TOKENIZER.unguard(guarded) == text
    ids = TOKENIZER.encode(guarded)
    assert not set(ids) & set(SPECIAL)
    assert TOKENIZER.decode(ids) == text


@given(st.lists(st.integers(0, TOKENIZER.size - 2), max_size=30), st.lists(st.integers(1, 4), min_size=1, max_size=10))
@settings(max_examples=200, deadline=None)
def test_pieces_of_text_are_the_text_of_whole_characters(ids: list[int], sizes: list[int]) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    pieces: list[str] = []
    left = list(ids)
    for size in itertools.cycle(sizes):
        if not left:
            break
        pieces.append(detokenizer.feed(left[:size]))
        del left[:size]
    pieces.append(detokenizer.finish())
    assert "".join(pieces) == detokenizer.text
    whole = TOKENIZER.decode(ids)
    if "\ufffd" not in whole:
        assert detokenizer.text == whole


@given(st.text(max_size=20), st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_a_streamed_text_is_the_text(text: str, size: int) -> None:
    ids = TOKENIZER.encode(TOKENIZER.guard(text))
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.feed(ids[at : at + size]) for at in range(0, len(ids), size)]
    assert "".join([*pieces, detokenizer.finish()]) == text


@given(markup, st.lists(st.integers(1, 5), min_size=1, max_size=6), st.booleans(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_a_streamed_message_is_the_whole_message(text: str, sizes: list[int], tools: bool, thinking: bool) -> None:
    def parser() -> OutputParser:
        numbers = itertools.count()
        return OutputParser(tools=tools, thinking=thinking, mint=lambda: f"c{next(numbers)}")

    whole = parser()
    whole.feed(text)
    whole.finish()
    streamed = parser()
    events: list[Any] = []
    at = 0
    for size in itertools.cycle(sizes):
        if at >= len(text):
            break
        events += streamed.feed(text[at : at + size])
        at += size
    events += streamed.finish()
    assert (streamed.message, streamed.status) == (whole.message, whole.status)
    assert "".join(event.text for event in events if isinstance(event, Text)) == whole.message.content
    assert "".join(event.text for event in events if isinstance(event, Thought)) == whole.message.reasoning


turns = st.lists(st.tuples(st.booleans(), texts, texts), min_size=1, max_size=4)
TOOLS: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
SAID = st.text("abc x", min_size=1, max_size=8)


@given(turns, st.lists(SAID, min_size=4, max_size=4))
@settings(max_examples=60, deadline=None)
def test_an_extended_prompt_is_the_template_s_own_text(
    given_turns: list[tuple[bool, str, str]], said: list[str]
) -> None:
    """What the model says canonically is rendered by the template to the very ids that extension gives."""
    s = Session(renderer=renderer("parcels"), tools=TOOLS)
    history: list[Any] = [user("go")]
    for (calls, text, other), words in zip(given_turns, said, strict=False):
        output = words.strip() or "x"
        if calls:
            output += '\n<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'
        answer = s.say(history, output)
        history += [answer, tool(answer, text) if calls else user(text), *([user(other)] if other else [])]
        extended = s.plan(history)
        fresh = Session(renderer=s.renderer, tools=TOOLS).plan(history)
        assert (extended.origin, fresh.origin) == ("extended", "fresh")
        assert extended.ids.tolist() == fresh.ids.tolist()


def test_more_special_tokens_are_guarded_too() -> None:
    glm = tokenizer("<|user|>", "<|user|>x")
    assert len(glm.encode("<|user|>x")) == 1
    assert len(glm.encode(glm.guard("<|user|>x"))) > 1
