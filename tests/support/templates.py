"""Renderers and small sessions for tests: the demo's tokenizer with templates of several families."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from rlagent.router.chat_template import ChatTemplate
from rlagent.router.conversation import Conversation, Message
from rlagent.router.dialects.chat import parse
from rlagent.router.plan import Plan
from rlagent.router.rehearsal import Rehearsal
from rlagent.router.render import Renderer
from rlagent.router.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "parcels" / "model"
GOLDEN = ROOT / "tests" / "golden"
GLM_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")

# The tokens that a family's template is written with, and the eos among them.
FAMILY_TOKENS = {
    "glm_like": GLM_TOKENS,
    "llama3_like": ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
    "mistral_like": (
        "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
    ),
    "deepseek_like": (
        "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>",
        "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
    ),
    "harmony_like": ("<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"),
}  # fmt: skip


def eos_of(family: str) -> str:
    """The token that ends a turn."""
    return FAMILY_TOKENS[family][0] if family in FAMILY_TOKENS and family != "glm_like" else "<|im_end|>"


def tokenizer(*more: str) -> Tokenizer:
    """The demo's tokenizer, with more special tokens."""
    backend = Backend.from_file(str(MODEL / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in more])
    return Tokenizer(backend, backend.to_str().encode())


def renderer(family: str) -> Renderer:
    """The renderer of "parcels", or of a template in tests/golden."""
    if family == "parcels":
        return Renderer.load(MODEL)
    source = (GOLDEN / f"{family}.jinja").read_text()
    return Renderer(
        ChatTemplate({"default": source}, {"eos_token": eos_of(family)}, family),
        tokenizer(*FAMILY_TOKENS.get(family, ())),
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
class Session(Rehearsal):
    """A rehearsal that is asked in the chat dialect's own form."""

    tools: Sequence[Any] = ()
    args: dict[str, Any] = field(default_factory=dict)

    def plan(self, messages: Sequence[Any]) -> Plan:
        """The prompt of a request."""
        return self.planned(conversation(messages, self.tools, **self.args))

    def say(
        self, messages: Sequence[Any], text: str | Sequence[int], *, eos: str | None = "", stop: str | None = None,
        planned: Plan | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Record `text` (or ids) as the sampled output; the served message as an SDK sends it back."""
        asked = conversation(messages, self.tools, **self.args)
        return sent_back(self.sampled(asked, text, eos=eos, stop=stop, planned=planned))


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
