"""A session without HTTP and without an engine: prompts are planned as the router plans them, and what the model "says" is given.

`rlagent doctor` asks a template its questions through it. Invariant: planning, reading and recording are the router's own code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from rlagent.router.conversation import Conversation, Message, Root, root_of
from rlagent.router.forest import Forest
from rlagent.router.plan import Plan, Reasoning, plan
from rlagent.router.reader import ChoiceReader
from rlagent.router.render import Renderer
from rlagent.types import Call, Choice, ParentRef, Sampling, VersionSpan


@dataclass(kw_only=True)
class Rehearsal:
    """One session. `calls` are what would have been recorded."""

    renderer: Renderer
    reasoning: Reasoning = "all"
    eos: str = "<|im_end|>"
    model: str = "m"
    forest: Forest = field(default_factory=Forest)
    calls: list[Call] = field(default_factory=list)

    def planned(self, asked: Conversation) -> Plan:
        """The prompt of a request."""
        return plan(self.forest, self.renderer, asked, self._root(asked), self.reasoning)

    def sampled(
        self,
        asked: Conversation,
        text: str | Sequence[int],
        *,
        eos: str | None = "",
        stop: str | None = None,
        planned: Plan | None = None,
    ) -> Message:
        """Record `text` (or ids) as the answer to a request; the message as it is served.

        eos: the text of the stop token; "" is the session's, None a completion cut by its length.
        """
        found = planned or self.planned(asked)
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
        family = self.renderer.output_form
        tail = tokenizer.decode(found.ids[-8:].tolist()).rstrip()
        reader = ChoiceReader(
            tokenizer,
            tools=bool(asked.tools),
            thinking=bool(family.think[0]) and tail.endswith(family.think[0]),
            stops=() if stop is None else (stop,),
            family=family,
            schemas=asked.tools,
        )
        reader.finish(choice)
        self._record(asked, found, choice, reader.message)
        return reader.message

    def _record(self, asked: Conversation, found: Plan, choice: Choice, served: Message) -> None:
        root = self._root(asked)
        parent = None if found.parent is None else ParentRef(call_id=found.parent.call_id, choice=found.parent.choice)
        note = {"root": {"model": root.model, "tools": root.tools, "template": root.template}, "segment": found.segment}
        index = self.forest.take_index()
        call = Call(
            call_id=f"c{len(self.calls)}", session_id="s", index=index, dialect="chat", model=self.model, parent=parent,
            origin=found.origin, reason=found.reason, prompt_suffix=found.suffix, prompt_len=len(found.ids),
            choices=(choice,), sampling=Sampling(), messages=orjson.dumps([one.to_json() for one in found.new]),
            served=orjson.dumps([served.to_json()]), started_at=0.0, finished_at=0.0, client=orjson.dumps(note),
        )  # fmt: skip
        self.calls.append(call)
        self.forest.add(call, root, found.segment, found.new, [served])

    def _root(self, asked: Conversation) -> Root:
        return root_of(self.model, asked, self.renderer.digest)

    def ids(self, text: str) -> list[int]:
        """Ids of a text."""
        return self.renderer.tokenizer.encode(text)

    def text(self, ids: Any) -> str:
        """Text of ids."""
        return self.renderer.tokenizer.decode([int(token) for token in ids])
