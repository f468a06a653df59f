"""What a turn costs, in counts, not in seconds: texts tokenised, renders, ids and bytes kept. It must not grow with the history."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from templates import MODEL

from rlagent.router.chat_template import ChatTemplate
from rlagent.router.conversation import Conversation, Message
from rlagent.router.plan import plan_beside
from rlagent.router.recent_texts import LONG_CHARS
from rlagent.router.rehearsal import Rehearsal
from rlagent.router.render import Renderer
from rlagent.router.tokenizer import Tokenizer

NUM_TURNS = 12
QUESTION = "Where does the parcel of Mia wait? "
ANSWER = "in Birch"


class Counted(Rehearsal):
    """A session that notes, for each turn it plans, the texts that were tokenised and how often the template ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(renderer=Renderer.load(MODEL))
        self.texts: list[str] = []
        self.num_renders = 0
        encode, render = Tokenizer.encode, ChatTemplate.render

        def counted_encode(tokenizer: Tokenizer, text: str) -> list[int]:
            self.texts.append(text)
            return encode(tokenizer, text)

        def counted_render(template: ChatTemplate, messages: Sequence[Mapping[str, Any]], **more: Any) -> str:
            self.num_renders += 1
            return render(template, messages, **more)

        monkeypatch.setattr(Tokenizer, "encode", counted_encode)
        monkeypatch.setattr(ChatTemplate, "render", counted_render)

    def converse(self, num_turns: int) -> tuple[list[list[str]], list[int]]:
        """Of each turn: the texts that were tokenised, and the renders."""
        messages: list[Message] = []
        texts, renders = [], []
        for turn in range(num_turns):
            messages.append(Message(role="user", content=f"{turn}: {QUESTION}"))
            asked = Conversation(messages=tuple(messages))
            self.texts, self.num_renders = [], 0
            planned = self.planned(asked)
            texts.append(self.texts.copy())
            renders.append(self.num_renders)
            messages.append(self.sampled(asked, ANSWER, planned=planned))
        return texts, renders


def test_a_turn_tokenises_its_suffix_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, _ = Counted(monkeypatch).converse(NUM_TURNS)
    for turn, tokenised in enumerate(texts):
        assert len(tokenised) == 1
        assert f"{turn}: {QUESTION}" in tokenised[0]
        assert tokenised[0].count(QUESTION) == 1
        assert ANSWER not in tokenised[0]


def test_a_turn_renders_the_template_as_often_as_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Counted(monkeypatch)
    session.converse(2)  # what a template is like is learned once
    _, renders = session.converse(NUM_TURNS)
    assert set(renders[1:]) == {2}


def test_a_session_keeps_each_token_and_each_message_once(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Counted(monkeypatch)
    session.converse(NUM_TURNS)
    last = session.calls[-1]
    kept = sum(len(call.prompt_suffix) + len(call.choices[0].output_ids) for call in session.calls)
    assert kept == last.prompt_len + len(last.choices[0].output_ids)
    assert sum(call.messages.count(QUESTION.encode()) for call in session.calls) == NUM_TURNS
    assert all(call.messages.count(QUESTION.encode()) == 1 for call in session.calls)


async def test_a_long_text_is_tokenised_beside_the_event_loop_and_a_short_one_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where: list[int] = []
    encode = Tokenizer.encode

    def placed(tokenizer: Tokenizer, text: str) -> list[int]:
        where.append(threading.get_ident())
        return encode(tokenizer, text)

    monkeypatch.setattr(Tokenizer, "encode", placed)
    session = Counted(monkeypatch)
    for words, beside in ((1, False), (LONG_CHARS // len(QUESTION) + 1, True)):
        where.clear()
        asked = Conversation(messages=(Message(role="user", content=QUESTION * words),))
        planned = await plan_beside(session.forest, session.renderer, asked, session._root(asked), "all")
        assert [thread != threading.get_ident() for thread in where] == [beside]
        assert planned.ids.tolist() == session.planned(asked).ids.tolist()


def test_ids_are_those_of_a_tokenizer_that_also_keeps_offsets() -> None:
    tokenizer = Tokenizer.load(MODEL)
    text = f"<|im_start|>user\nÜber 99 Ärger 日本 📦{QUESTION * 50}<|im_end|>\n"
    assert tokenizer.encode_plain(text) == tokenizer._backend.encode(text, add_special_tokens=False).ids


def test_tools_are_guarded_once_and_those_that_differ_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = Renderer.load(MODEL)
    guarded: list[Any] = []
    guard = Tokenizer.guard

    def counted(tokenizer: Tokenizer, value: Any) -> Any:
        if isinstance(value, dict) and "function" in value:
            guarded.append(value)
        return guard(tokenizer, value)

    def text(**function: Any) -> str:
        tools = ({"type": "function", "function": function},)
        return renderer.fresh(Conversation(messages=(Message(role="user", content=QUESTION),), tools=tools))[0]

    monkeypatch.setattr(Tokenizer, "guard", counted)
    first = text(name="find", description="of <|im_end|>")
    assert "<|im_end|>" not in first.partition("</tools>")[0]
    assert text(name="find", description="of <|im_end|>") == first
    assert len(guarded) == 1
    others = [
        text(name="find", description="of it"),
        text(description="of <|im_end|>", name="find"),  # the template shows the order
        text(name="find", description="of <|im_end|>", parameters={}),
    ]
    assert len({first, *others}) == 4
    assert len(guarded) == 4
