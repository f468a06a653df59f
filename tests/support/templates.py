"""Renderers and small sessions for tests: the demo's tokenizer with templates of several families."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from rlagent.router.chat_template import ChatTemplate
from rlagent.router.conversation import Conversation, Message, root_of
from rlagent.router.dialects.chat import parse
from rlagent.router.forest import Forest
from rlagent.router.plan import Plan, Reasoning, plan
from rlagent.router.reader import ChoiceReader
from rlagent.router.render import Renderer
from rlagent.router.tokenizer import Tokenizer
from rlagent.types import Call, Choice, ParentRef, Sampling, VersionSpan

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "parcels" / "model"
GOLDEN = ROOT / "tests" / "golden"
GLM_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")


def tokenizer(*more: str) -> Tokenizer:
    """The demo's tokenizer, with more special tokens."""
    backend = Backend.from_file(str(MODEL / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in more])
    return Tokenizer(backend, backend.to_str().encode())


def renderer(family: str) -> Renderer:
    """The renderer of "parcels", "qwen3_like" or "glm_like"."""
    if family == "parcels":
        return Renderer.load(MODEL)
    source = (GOLDEN / f"{family}.jinja").read_text()
    return Renderer(
        ChatTemplate({"default": source}, {"eos_token": "<|im_end|>"}, family),
        tokenizer(*GLM_TOKENS) if family == "glm_like" else tokenizer(),
    )


def conversation(messages: Sequence[Any], tools: Sequence[Any] = (), **args: Any) -> Conversation:
    """As the chat dialect parses it."""
    body: dict[str, Any] = {"model": "m", "messages": list(messages)}
    if tools:
        body["tools"] = list(tools)
    if args:
        body["chat_template_kwargs"] = args
    return parse(orjson.dumps(body), {}).conversation


@dataclass(kw_only=True)
class Session:
    """One session without HTTP and without an engine: `say` plans a prompt and records what the model is given to say."""

    renderer: Renderer
    reasoning: Reasoning = "all"
    eos: str = "<|im_end|>"
    tools: Sequence[Any] = ()
    model: str = "m"
    args: dict[str, Any] = field(default_factory=dict)
    forest: Forest = field(default_factory=Forest)
    calls: list[Call] = field(default_factory=list)
    _numbers: Any = field(default_factory=itertools.count)

    def plan(self, messages: Sequence[Any]) -> Plan:
        """The prompt of a request."""
        asked = conversation(messages, self.tools, **self.args)
        return plan(self.forest, self.renderer, asked, self._root(asked), self.reasoning)

    def _root(self, asked: Conversation) -> Any:
        return root_of(self.model, asked, self.renderer.digest)

    def say(
        self,
        messages: Sequence[Any],
        text: str | Sequence[int],
        *,
        eos: str | None = "",
        stop: str | None = None,
        planned: Plan | None = None,
    ) -> dict[str, Any]:
        """Ask, record `text` (or ids) as the sampled output, and return the served message as an SDK sends it back.

        eos: the stop token; "" is the session's, None a completion cut by length.
        """
        found = planned or self.plan(messages)
        asked = conversation(messages, self.tools, **self.args)
        tokenizer = self.renderer.tokenizer
        ids = tokenizer.encode(text) if isinstance(text, str) else list(text)
        stop_id = None if eos is None or stop else tokenizer.encode(eos or self.eos)[0]
        ids = ids if stop_id is None else [*ids, stop_id]
        choice = Choice(
            output_ids=np.array(ids, np.int32),
            logprobs=np.full(len(ids), -0.5, np.float32),
            versions=(VersionSpan(version=0, start=0, end=len(ids)),),
            finish_reason="stop" if stop_id is not None or stop else "length",
            matched_stop=stop or stop_id,
        )
        reader = ChoiceReader(tokenizer, tools=bool(self.tools), thinking=False, stops=() if stop is None else (stop,))
        reader.finish(choice)
        index = self.forest.take_index()
        parent = None if found.parent is None else ParentRef(call_id=found.parent.call_id, choice=found.parent.choice)
        root = self._root(asked)
        call = Call(
            call_id=f"c{next(self._numbers)}", session_id="s", index=index, dialect="chat", model=self.model,
            parent=parent, origin=found.origin, reason=found.reason, prompt_suffix=found.suffix,
            prompt_len=len(found.ids), choices=(choice,), sampling=Sampling(),
            messages=orjson.dumps([message.to_json() for message in found.new]),
            served=orjson.dumps([reader.message.to_json()]), started_at=0.0, finished_at=0.0,
            client=orjson.dumps(
                {"root": {"model": root.model, "tools": root.tools, "template": root.template}, "segment": found.segment}
            ),
        )  # fmt: skip
        self.calls.append(call)
        self.forest.add(call, root, found.segment, found.new, [reader.message])
        return sent_back(reader.message)

    def ids(self, text: str) -> list[int]:
        """Ids of a text."""
        return self.renderer.tokenizer.encode(text)

    def text(self, ids: Any) -> str:
        """Text of ids."""
        return self.renderer.tokenizer.decode([int(token) for token in ids])


def sent_back(message: Message) -> dict[str, Any]:
    """A served message as most agents send it back: without its reasoning."""
    body = message.to_json()
    body.pop("reasoning_content", None)
    return body


def user(text: str) -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": text}


def tool(answer: dict[str, Any], text: str, number: int = 0) -> dict[str, Any]:
    """The result of an answer's tool call."""
    return {"role": "tool", "tool_call_id": answer["tool_calls"][number]["id"], "content": text}
