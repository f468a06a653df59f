"""`rlagent doctor`: does a model directory's chat template let recorded tokens be reused turn after turn? On a CPU, without torch.

The template is asked to write small conversations. What it writes for an assistant's turn is taken as what the model sampled, the
router plans the next turn as it would for an agent, and the prompt must go on from those ids, with the very text that the template
gives for the whole history. Invariant: a verdict comes from the router's own planning, never from knowledge about a model's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import orjson

from rlagent.errors import LoadError
from rlagent.router.chat_template import TemplateError
from rlagent.router.conversation import Conversation, Message, ToolCall
from rlagent.router.plan import Plan, Reasoning
from rlagent.router.rehearsal import Rehearsal
from rlagent.router.render import Renderer, Segments
from rlagent.router.tokenizer import read_stop_ids

Verdict = Literal["ok", "note", "fails"]

_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
_QUESTION: Final = Message(role="user", content="What does it say? Naïve café, 数字 7, 🙂.")
_NEXT: Final = Message(role="user", content="Go on.")
_THOUGHT: Final = "First I look."


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check. `core`: without it nothing can be trained turn by turn."""

    name: str
    verdict: Verdict
    detail: str
    core: bool = False


class _Unfit(Exception):
    """Why a conversation cannot go on from recorded tokens."""


def examine(model_dir: Path) -> list[Finding]:
    """All checks of a model directory. LoadError if it has no tokenizer or no chat template."""
    renderer = Renderer.load(model_dir)
    stops = _stop_texts(model_dir, renderer)
    patient = _Patient(renderer, stops)
    takes_tools = patient.takes_tools()
    checks: list[tuple[str, bool, Callable[[], str]]] = [
        ("the stop token", True, patient.stop_token),
        ("a chat of three turns", True, lambda: patient.dialogue([_say("One."), _say("Two."), _say("Three.")])),
        ("a system prompt", False, lambda: patient.dialogue([_say("One."), _say("Two.")], system="Be brief.")),
        ("an answer cut by its length", False, patient.truncated),
        ("ids that the tokenizer would not choose", True, patient.non_canonical),
        ("special tokens in an agent's text", True, patient.injection),
    ]
    if takes_tools:
        checks += [
            ("a tool loop", True, lambda: patient.tool_loop(1, "")),
            ("a tool call behind text", False, lambda: patient.tool_loop(1, "Let me look.")),
            ("two tool calls at once", False, lambda: patient.tool_loop(2, "")),
            ("reasoning kept (router.reasoning = all)", False, lambda: patient.thinking("all", tools=True)),
        ]
    checks.append(("reasoning of earlier questions", False, lambda: patient.thinking("template", tools=False)))
    findings = [_family(renderer), *(_check(name, core, work) for name, core, work in checks)]
    if not takes_tools:
        findings.append(Finding(name="tools", verdict="note", detail="the template does not show tools to the model"))
    return findings


def _family(renderer: Renderer) -> Finding:
    """Which parser reads the answers, and how the template takes tool calls."""
    if not renderer.family_known:
        detail = "not known by its marks: answers are served as text and tool calls are not read; set router.family"
        return Finding(name="the model family", verdict="note", detail=detail)
    form = renderer.message_form
    wants = [
        name
        for name, wanted in (
            ("arguments as text", form.arguments_as_text),
            ("no content beside calls", form.null_content),
            ("call ids of nine characters", form.short_ids),
        )
        if wanted
    ]
    calls = "prints no earlier tool calls" if not form.shows_calls else f"takes {', '.join(wants)}" if wants else ""
    detail = f"{renderer.output_form.name}" + (f"; the template {calls}" if calls else "")
    return Finding(name="the model family", verdict="ok", detail=detail)


def _check(name: str, core: bool, work: Callable[[], str]) -> Finding:
    try:
        return Finding(name=name, verdict="ok", detail=work(), core=core)
    except TemplateError as error:
        return Finding(name=name, verdict="note", detail=f"the template refuses it: {error}", core=core)
    except _Unfit as error:
        return Finding(name=name, verdict="fails" if core else "note", detail=str(error), core=core)


def _stop_texts(model_dir: Path, renderer: Renderer) -> tuple[str, ...]:
    """The tokens at which engines stop: eos_token_id of the configs, else the tokenizer's eos_token."""
    found = tuple(renderer.tokenizer.decode([token]) for token in sorted(read_stop_ids(model_dir)))
    if found:
        return found
    path = model_dir / "tokenizer_config.json"
    eos = orjson.loads(path.read_bytes()).get("eos_token") if path.is_file() else None
    text = eos.get("content") if isinstance(eos, dict) else eos
    if not isinstance(text, str):
        raise LoadError(
            f"{str(model_dir)!r} names no eos token: neither in its config.json, nor in tokenizer_config.json"
        )
    return (text,)


def _say(text: str) -> Message:
    return Message(role="assistant", content=text)


class _Patient:
    """The questions, each of a fresh session."""

    def __init__(self, renderer: Renderer, stops: Sequence[str]) -> None:
        self._renderer = renderer
        self._stops = stops

    def takes_tools(self) -> bool:
        """Whether a tool's name reaches the prompt."""
        try:
            text, _ = self._renderer.fresh(Conversation(messages=(_QUESTION,), tools=(_TOOL,)))
        except TemplateError:
            return False
        return "look_up" in text

    def stop_token(self) -> str:
        """The template must end an assistant's turn by a token at which the engine stops."""
        written = self._around([_QUESTION, _say("One."), _NEXT]).texts[1]
        found = [stop for stop in self._stops if written.startswith(stop)]
        if not found:
            raise _Unfit(
                f"the template goes on with {written[:24]!r} after an answer, and engines stop at {', '.join(map(repr, self._stops))}: "
                "the stop token is then no part of the history, and every turn is rendered afresh"
            )
        return f"the template ends a turn by {found[0]!r}, at which engines stop"

    def dialogue(self, answers: Sequence[Message], *, system: str = "") -> str:
        """Questions and answers in turn."""
        history = [*([Message(role="system", content=system)] if system else []), _QUESTION]
        session = self._session()
        for answer in answers:
            self._turn(session, history, answer)
            history += [answer, _NEXT]
        return self._went_on(session, history)

    def tool_loop(self, count: int, text: str) -> str:
        """Calls, their results, an answer, the next question."""
        words = ["alpha", "beta"][:count]
        calls = tuple(
            ToolCall(call_id=f"call_{i}", name="look_up", arguments=f'{{"word": "{word}"}}')
            for i, word in enumerate(words)
        )
        session, history = self._session(), [_QUESTION]
        served = self._turn(session, history, Message(role="assistant", content=text, tool_calls=calls), tools=True)
        found = [(call.name, orjson.loads(call.arguments)) for call in served.tool_calls]
        if found != [("look_up", {"word": word}) for word in words]:
            raise _Unfit(
                f"what the template writes for calls is not read as such: {served.to_json()}; see router.family"
            )
        results = [
            Message(role="tool", content=f"found {call.name}", tool_call_id=call.call_id) for call in served.tool_calls
        ]
        history += [served, *results]
        self._turn(session, history, _say("It is here."), tools=True)
        history += [_say("It is here."), _NEXT]
        return self._went_on(session, history, tools=True)

    def thinking(self, reasoning: Reasoning, *, tools: bool) -> str:
        """An answer with reasoning, which the client does not send back."""
        answer = Message(role="assistant", content="One.", reasoning=_THOUGHT)
        session, history = self._session(reasoning), [_QUESTION]
        text = self._around([_QUESTION, answer], tools=tools).turns[0]
        if _THOUGHT not in text:  # a template that leaves earlier reasoning out does not say how it is written
            if len(session.ids("<think>")) != 1:
                return "the template writes no reasoning; what a model thinks is part of its text"
            text = f"<think>\n{_THOUGHT}\n</think>\n\nOne."
        asked = self._asked(history, tools=tools)
        served = session.sampled(asked, text, eos=self._stop(history, answer, tools=tools))
        if not served.reasoning:
            raise _Unfit(f"reasoning is written as {text[:40]!r} and served as text")
        plan = session.planned(self._asked([*history, replace(served, reasoning=""), _NEXT], tools=tools))
        if plan.origin == "extended":
            return "kept: the next turn goes on from it"
        if plan.reason == "reasoning_dropped":
            return "dropped by the template: with router.reasoning = 'template' the next question starts a new row, with 'all' it is kept"
        raise _Unfit(f"the next turn is rendered afresh ({plan.reason})")

    def truncated(self) -> str:
        """The template closes what the model could not."""
        session, history = self._session(), [_QUESTION]
        self._turn(session, history, _say("One."), cut=True)
        return self._went_on(session, [*history, _say("One."), _NEXT])

    def non_canonical(self) -> str:
        """Letter by letter instead of word by word."""
        session, history = self._session(), [_QUESTION]
        letters = [token for letter in "code" for token in session.ids(letter)]
        asked = self._asked(history)
        session.sampled(asked, letters, eos=self._stop(history, _say("code")))
        plan = self._next(session, [*history, _say("code"), _NEXT])
        start = session.calls[0].prompt_len
        if plan.ids[start : start + len(letters)].tolist() != letters:
            raise _Unfit("the ids were tokenised again")
        return "kept as they were sampled"

    def injection(self) -> str:
        """The text of a special token stays text."""
        tokens = [token for token in self._stops if self._renderer.tokenizer.encode(token)]
        plain, loud = (
            self._session().planned(self._asked([Message(role="user", content=text)])).ids.tolist()
            for text in ("a", "a" + "".join(tokens))
        )
        for token in tokens:
            (number, *more) = self._renderer.tokenizer.encode(token)
            if not more and plain.count(number) != loud.count(number):
                raise _Unfit(f"{token!r} in a user's message becomes the token {number}")
        return f"{', '.join(map(repr, tokens))} in a message are spelled out"

    # The steps of a session

    def _session(self, reasoning: Reasoning = "all") -> Rehearsal:
        return Rehearsal(renderer=self._renderer, reasoning=reasoning)

    def _asked(self, messages: Sequence[Message], *, tools: bool = False) -> Conversation:
        return Conversation(messages=tuple(messages), tools=(_TOOL,) if tools else ())

    def _around(self, messages: Sequence[Message], *, tools: bool = False) -> Segments:
        """The template's text around the one assistant's turn, and that turn."""
        position = max(index for index, message in enumerate(messages) if message.role == "assistant")
        more = [] if position + 1 < len(messages) else [_NEXT]
        found = self._renderer.segments(self._asked([*messages, *more], tools=tools), [position])
        if found is None:
            raise _Unfit("the text around an answer depends on the answer: every turn is rendered afresh")
        return found

    def _stop(self, history: Sequence[Message], answer: Message, *, tools: bool = False) -> str | None:
        behind = _following(answer)
        written = self._around([*history, answer, *behind], tools=tools).texts[1]
        return next((stop for stop in self._stops if written.startswith(stop)), self._stops[0])

    def _turn(
        self, session: Rehearsal, history: Sequence[Message], answer: Message, *, tools: bool = False, cut: bool = False
    ) -> Message:
        """One request, answered by what the template writes for `answer`."""
        text = self._around([*history, answer, *_following(answer)], tools=tools).turns[0]
        asked = self._asked(history, tools=tools)
        plan = session.planned(asked)
        if session.calls and plan.origin != "extended":
            raise _Unfit(f"turn {len(session.calls) + 1} is rendered afresh ({plan.reason})")
        opened = session.text(plan.ids[-8:].tolist())
        for opening in ("<think>\n", "<think>"):  # the prompt itself opened the reasoning
            if opened.endswith(opening) and text.startswith(opening):
                text = text.removeprefix(opening)
        return session.sampled(asked, text, eos=None if cut else self._stop(history, answer, tools=tools), planned=plan)

    def _next(self, session: Rehearsal, history: Sequence[Message], *, tools: bool = False) -> Plan:
        plan = session.planned(self._asked(history, tools=tools))
        if plan.origin != "extended":
            raise _Unfit(f"turn {len(session.calls) + 1} is rendered afresh ({plan.reason})")
        return plan

    def _went_on(self, session: Rehearsal, history: Sequence[Message], *, tools: bool = False) -> str:
        """The last prompt is an extension, and its text the template's own."""
        plan = self._next(session, history, tools=tools)
        known = [token for call in session.calls[:1] for token in call.prompt_suffix.tolist()]
        if plan.ids[: len(known)].tolist() != known:
            raise _Unfit("the first prompt is no prefix of the last")
        whole, _ = self._renderer.fresh(self._asked(history, tools=tools))
        text = session.text(plan.ids.tolist())
        if text != self._renderer.tokenizer.unguard(whole):
            at = next(
                (i for i, (a, b) in enumerate(zip(text, whole, strict=False)) if a != b), min(len(text), len(whole))
            )
            raise _Unfit(
                f"goes on, but the template's own text differs at {whole[at : at + 24]!r}; recorded {text[at : at + 24]!r}"
            )
        return f"{len(session.calls) + 1} prompts, each extends the last in the template's own words"


def _following(answer: Message) -> Iterator[Message]:
    """What a history puts behind an answer: results of its calls, or a question."""
    if not answer.tool_calls:
        yield _NEXT
    for call in answer.tool_calls:
        yield Message(role="tool", content="found", tool_call_id=call.call_id)


def proven(findings: Sequence[Finding]) -> bool:
    """Whether token-in reuse holds in every core check."""
    return all(finding.verdict == "ok" for finding in findings if finding.core)


def to_json(model_dir: Path, findings: Sequence[Finding]) -> dict[str, Any]:
    """For machines."""
    return {
        "model": str(model_dir),
        "proven": proven(findings),
        "findings": [
            {"name": one.name, "verdict": one.verdict, "core": one.core, "detail": one.detail} for one in findings
        ],
    }
