"""The conversations that `rlagent doctor` has with a chat template, each of a fresh session: what the template writes for an
assistant's turn is taken as what the model sampled, and the next prompt must go on from it.

Invariant: planning, reading and recording are the router's own (router/rehearsal.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import orjson

from rlagent.router.chat_template import TemplateError
from rlagent.router.conversation import Conversation, Message, ToolCall
from rlagent.router.plan import Plan, Reasoning
from rlagent.router.rehearsal import Rehearsal
from rlagent.router.render import Renderer, Segments

_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
QUESTION: Final = Message(role="user", content="What does it say? Naïve café, 数字 7, 🙂.")
_NEXT: Final = Message(role="user", content="Go on.")
_THOUGHT: Final = "First I look."


class Unfit(Exception):
    """Why a conversation cannot go on from recorded tokens."""


class Patient:
    """The questions, each of a fresh session."""

    def __init__(self, renderer: Renderer, stops: Sequence[str]) -> None:
        self._renderer = renderer
        self._stops = stops

    def takes_tools(self) -> bool:
        """Whether a tool's name reaches the prompt."""
        try:
            text, _ = self._renderer.fresh(Conversation(messages=(QUESTION,), tools=(_TOOL,)))
        except TemplateError:
            return False
        return "look_up" in text

    def stop_token(self) -> str:
        """The template must end an assistant's turn by a token at which the engine stops."""
        written = self._around([QUESTION, _say("One."), _NEXT]).texts[1]
        found = [stop for stop in self._stops if written.startswith(stop)]
        for stop in self._stops:
            end = self._renderer.output_form.history_ends.get(stop)
            if end is not None and written.startswith(end):
                return f"the sampled {stop!r} stands where the template has {end!r} (with router.reasoning = 'template': a new row)"
        if not found:
            raise Unfit(
                f"the template goes on with {written[:24]!r} after an answer, and engines stop at {', '.join(map(repr, self._stops))}: "
                "the stop token is then no part of the history, and every turn is rendered afresh"
            )
        return f"the template ends a turn by {found[0]!r}, at which engines stop"

    def dialogue(self, count: int, *, system: str = "") -> str:
        """Questions and answers in turn."""
        history = [*([Message(role="system", content=system)] if system else []), QUESTION]
        session = self.session()
        for text in ("One.", "Two.", "Three.")[:count]:
            self._answer(session, history, _say(text))
        return self.went_on(session, history)

    def tool_loop(self, count: int, text: str) -> str:
        """Calls and their results, twice."""
        session, history = self.session(), [QUESTION]
        for words in (("alpha", "beta"), ("gamma", "delta")):
            self._call(session, history, words[:count], text)
        return self.went_on(session, history, tools=True)

    def next_question(self) -> str:
        """Calls, their results, an answer, another question."""
        session, history = self.session(), [QUESTION]
        self._call(session, history, ("alpha",), "")
        self._answer(session, history, _say("It is here."), tools=True)
        return self.went_on(session, history, tools=True)

    def _call(self, session: Rehearsal, history: list[Message], words: Sequence[str], text: str) -> None:
        """A turn with calls, which must be read as such, and its results."""
        calls = tuple(
            ToolCall(call_id=f"call_{word}", name="look_up", arguments=f'{{"word": "{word}"}}') for word in words
        )
        served = self.turn(session, history, Message(role="assistant", content=text, tool_calls=calls), tools=True)
        found = [(call.name, orjson.loads(call.arguments)) for call in served.tool_calls]
        if found != [("look_up", {"word": word}) for word in words]:
            raise Unfit(
                f"what the template writes for calls is not read as such: {served.to_json()}; see router.family"
            )
        results = (
            Message(role="tool", content=f"found {call.name}", tool_call_id=call.call_id) for call in served.tool_calls
        )
        history += [served, *results]

    def _answer(
        self, session: Rehearsal, history: list[Message], answer: Message, *, tools: bool = False, cut: bool = False
    ) -> None:
        """A turn that is text, and the next question."""
        history += [self.turn(session, history, answer, tools=tools, cut=cut), _NEXT]

    def thinking(self, reasoning: Reasoning, *, tools: bool) -> str:
        """An answer with reasoning, which the client does not send back."""
        answer = Message(role="assistant", content="One.", reasoning=_THOUGHT)
        session, history = self.session(reasoning), [QUESTION]
        asked = self._asked(history, tools=tools)
        text = self._written([QUESTION, answer], tools=tools)
        if _THOUGHT not in text:  # a template that leaves earlier reasoning out does not say how it is written
            thought = self._thought()
            if thought is None:
                return "the template writes no reasoning; what a model thinks is part of its text"
            text = f"{thought}One."
        served = session.sampled(asked, text, eos=self._stop(history, answer, tools=tools))
        if not served.reasoning:
            raise Unfit(f"reasoning is written as {text[:40]!r} and served as text")
        plan = session.planned(self._asked([*history, replace(served, reasoning=""), _NEXT], tools=tools))
        if plan.origin == "extended":
            return "kept: the next turn goes on from it"
        if plan.reason == "reasoning_dropped":
            return "dropped by the template: with router.reasoning = 'template' the next question starts a new row, with 'all' it is kept"
        raise Unfit(f"the next turn is rendered afresh ({plan.reason})")

    def truncated(self) -> str:
        """The template closes what the model could not."""
        session, history = self.session(), [QUESTION]
        self._answer(session, history, _say("One."), cut=True)
        return self.went_on(session, history)

    def non_canonical(self) -> str:
        """Letter by letter instead of word by word."""
        session, history = self.session(), [QUESTION]
        letters = [token for letter in "code" for token in session.ids(letter)]
        asked = self._asked(history)
        session.sampled(asked, letters, eos=self._stop(history, _say("code")))
        plan = self._next(session, [*history, _say("code"), _NEXT])
        start = session.calls[0].prompt_len
        if plan.ids[start : start + len(letters)].tolist() != letters:
            raise Unfit("the ids were tokenised again")
        return "kept as they were sampled"

    def injection(self) -> str:
        """The text of a special token stays text."""
        tokens = [token for token in self._stops if self._renderer.tokenizer.encode(token)]
        plain, loud = (
            self.session().planned(self._asked([Message(role="user", content=text)])).ids.tolist()
            for text in ("a", "a" + "".join(tokens))
        )
        for token in tokens:
            (number, *more) = self._renderer.tokenizer.encode(token)
            if not more and plain.count(number) != loud.count(number):
                raise Unfit(f"{token!r} in a user's message becomes the token {number}")
        return f"{', '.join(map(repr, tokens))} in a message are spelled out"

    # The steps of a session

    def session(self, reasoning: Reasoning = "all") -> Rehearsal:
        return Rehearsal(renderer=self._renderer, reasoning=reasoning)

    def _asked(self, messages: Sequence[Message], *, tools: bool = False) -> Conversation:
        return Conversation(messages=tuple(messages), tools=(_TOOL,) if tools else ())

    def _around(self, messages: Sequence[Message], *, tools: bool = False) -> Segments:
        """The template's text around the one assistant's turn, and that turn."""
        position = max(index for index, message in enumerate(messages) if message.role == "assistant")
        more = [] if position + 1 < len(messages) else [_NEXT]
        asked = self._asked([*messages, *more], tools=tools)
        for stop in self._stops:
            found = self._renderer.segments(asked, [position], [stop])
            if found is not None:
                return found
        raise Unfit("the text around an answer depends on the answer: every turn is rendered afresh")

    def _written(self, messages: Sequence[Message], *, tools: bool) -> str:
        """The one assistant's turn as a model writes it: all that stands between the prompt and the stop token."""
        found = self._around(messages, tools=tools)
        return self._renderer.lead(self._asked(messages, tools=tools), found.texts[0]) + found.turns[0]

    def _thought(self) -> str | None:
        """Reasoning as the family writes it, up to the answer; None where it has no marks for it."""
        form = self._renderer.output_form
        if form.name == "harmony":
            return f"<|channel|>analysis<|message|>{_THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>"
        opens, closes = form.think
        return f"{opens}\n{_THOUGHT}\n{closes}\n\n" if len(self._renderer.tokenizer.encode(opens)) == 1 else None

    def _stop(self, history: Sequence[Message], answer: Message, *, tools: bool = False) -> str | None:
        behind = _following(answer)
        written = self._around([*history, answer, *behind], tools=tools).texts[1]
        ends = self._renderer.output_form.history_ends
        fit = (stop for stop in self._stops if written.startswith((stop, ends.get(stop, stop))))
        return next(fit, self._stops[0])

    def turn(
        self, session: Rehearsal, history: Sequence[Message], answer: Message, *, tools: bool = False, cut: bool = False
    ) -> Message:
        """One request, answered by what the template writes for `answer`."""
        text = self._written([*history, answer, *_following(answer)], tools=tools)
        asked = self._asked(history, tools=tools)
        plan = session.planned(asked)
        if session.calls and plan.origin != "extended":
            raise Unfit(f"turn {len(session.calls) + 1} is rendered afresh ({plan.reason})")
        opened = session.text(plan.ids[-8:].tolist())
        for opening in ("<think>\n", "<think>"):  # the prompt itself opened the reasoning
            if opened.endswith(opening) and text.startswith(opening):
                text = text.removeprefix(opening)
        return session.sampled(asked, text, eos=None if cut else self._stop(history, answer, tools=tools), planned=plan)

    def _next(self, session: Rehearsal, history: Sequence[Message], *, tools: bool = False) -> Plan:
        plan = session.planned(self._asked(history, tools=tools))
        if plan.origin != "extended":
            raise Unfit(f"turn {len(session.calls) + 1} is rendered afresh ({plan.reason})")
        return plan

    def went_on(self, session: Rehearsal, history: Sequence[Message], *, tools: bool = False) -> str:
        """The last prompt is an extension, and its text the template's own."""
        plan = self._next(session, history, tools=tools)
        known = [token for call in session.calls[:1] for token in call.prompt_suffix.tolist()]
        if plan.ids[: len(known)].tolist() != known:
            raise Unfit("the first prompt is no prefix of the last")
        whole, _ = self._renderer.fresh(self._asked(history, tools=tools))
        whole, text = self._renderer.tokenizer.unguard(whole), session.text(plan.ids.tolist())
        for stop, end in self._renderer.output_form.history_ends.items():
            text = text.replace(stop, end)
        prompts = f"{len(session.calls) + 1} prompts, each extends the last"
        if text != whole:
            if "".join(text.split()) == "".join(whole.split()):
                return f"{prompts}; the template's own text has other white space around answers"
            at = next(
                (i for i, (a, b) in enumerate(zip(text, whole, strict=False)) if a != b), min(len(text), len(whole))
            )
            raise Unfit(
                f"goes on, but the template's own text differs at {whole[at : at + 24]!r}; recorded {text[at : at + 24]!r}"
            )
        return f"{prompts} in the template's own words"


def _say(text: str) -> Message:
    return Message(role="assistant", content=text)


def _following(answer: Message) -> Iterator[Message]:
    """What a history puts behind an answer: results of its calls, or a question."""
    if not answer.tool_calls:
        yield _NEXT
    for call in answer.tool_calls:
        yield Message(role="tool", content="found", tool_call_id=call.call_id)
