"""The calls of one session as a forest in memory: which recorded turn does a request go on from?

A node is one choice of one call, found by the digest of the history up to and including the message it was served as.
In the flow: plan.py asks `match`, the recorder `add`s what was committed. After a restart the forest is rebuilt from
the buffer. Invariant: a node holds its own segment only, so a session costs O(T), and a match never guesses: two nodes
that the client's message cannot tell apart, with different ids, match nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import orjson

from rlagent.router.conversation import Message, Root, digest, history_digests, match_key
from rlagent.router.raw_prompt import TextEnd, TextIndex
from rlagent.types import Call, Delivery, Int32Array


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    """One sampled choice. `position` is its message's place in the history, `history` the digest up to there."""

    call_id: str
    choice: int
    parent: Node | None
    root: Root
    position: int
    history: str
    prompt_suffix: Int32Array
    prompt_len: int
    output_ids: Int32Array
    stop_id: int | None  # the stop token, the last of output_ids, if one ended it
    segment: str  # digest of the text whose ids prompt_suffix are, without the turn's opening
    served: Message
    delivery: Delivery = "committed"
    num_hidden: int = 0  # tokens of the prompt that its ids do not count: what images are beyond their placeholders

    @property
    def chain(self) -> list[Node]:
        """From the root of its tree to this node."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def prompt_ids(self, *more: Int32Array) -> Int32Array:
        """Everything up to and including this node's output, and `more` behind it."""
        return np.concatenate(
            [*(piece for node in self.chain for piece in (node.prompt_suffix, node.output_ids)), *more]
        )


@dataclass(frozen=True, slots=True)
class Match:
    """The node to extend, or why there is none."""

    node: Node | None
    reason: str = ""


@dataclass(slots=True)
class Forest:
    """All recorded choices of one session."""

    next_index: int = 0  # of the session's next call
    has_images: bool = False  # in the prompt of any call
    _nodes: dict[str, list[Node]] = field(default_factory=dict)
    _by_call: dict[str, list[Node]] = field(default_factory=dict)
    _texts: TextIndex[Node] = field(default_factory=TextIndex)  # of raw prompts
    _tool_ids: set[str] = field(default_factory=set)  # minted in this session

    def take_index(self) -> int:
        """The number of the next call, in order of arrival."""
        self.next_index += 1
        return self.next_index - 1

    def match(self, messages: Sequence[Message], digests: Sequence[str], root: Root) -> Match:
        """The deepest recorded choice that the messages go on from."""
        if not self._nodes:
            return Match(None, "first")
        reason = ""
        has_assistant = False
        for position in range(len(messages) - 1, -1, -1):
            if messages[position].role != "assistant":
                continue
            has_assistant = True
            found = self._nodes.get(digests[position], [])
            same_root = [node for node in found if not node.root.change(root)]
            candidates = [node for node in same_root if self._compatible(node, messages)]
            if candidates:
                chosen = _choose(candidates)
                return Match(chosen, "" if chosen is not None else "ambiguous")
            if found and not reason:
                reason = "edited" if same_root else found[0].root.change(root)
        return Match(None, reason or ("edited" if has_assistant else "new_root"))

    def match_text(self, text: str, root: Root) -> tuple[Match, int]:
        """The deepest recorded completion whose text the given one begins with, and how long that text is."""
        if not self._nodes:
            return Match(None, "first"), 0
        for length, found in self._texts.find(text):
            candidates = [node for node in found if not node.root.change(root)]
            if candidates:
                chosen = _choose(candidates)
                return Match(chosen, "" if chosen is not None else "ambiguous"), length
        return Match(None, "edited"), 0

    def _compatible(self, node: Node, messages: Sequence[Message]) -> bool:
        """Neither the ids of tool calls nor the reasoning that the client sends back speak of another node."""
        for ancestor in node.chain:
            sent = messages[ancestor.position]
            if sent.reasoning and sent.reasoning != ancestor.served.reasoning:
                return False
            ids = [call.call_id for call in sent.tool_calls]
            minted = [call.call_id for call in ancestor.served.tool_calls]
            if ids != minted and not self._tool_ids.isdisjoint(ids):
                return False
        return True

    def add(
        self,
        call: Call,
        root: Root,
        segment: str,
        new: Sequence[Message],
        served: Sequence[Message],
        ends: Sequence[TextEnd] = (),
    ) -> None:
        """Enter a committed call. `new` are the messages behind its parent's; `ends` each choice's, of a raw prompt."""
        parent = None if call.parent is None else self._by_call[call.parent.call_id][call.parent.choice]
        before = "" if parent is None else parent.history
        history = history_digests(new, after=before)[-1] if new else before
        start = 0 if parent is None else parent.position + 1
        self.next_index = max(self.next_index, call.index + 1)
        self.has_images |= call.num_fed is not None
        nodes: list[Node] = []
        for number, (choice, message) in enumerate(zip(call.choices, served, strict=True)):
            matched = choice.matched_stop
            node = Node(
                call_id=call.call_id,
                choice=number,
                parent=parent,
                root=root,
                position=start + len(new),
                history=digest(history.encode(), match_key(message)),
                prompt_suffix=call.prompt_suffix,
                prompt_len=call.prompt_len,
                output_ids=choice.output_ids,
                stop_id=matched if isinstance(matched, int) and choice.finish_reason == "stop" else None,
                segment=segment,
                served=message,
                delivery=call.delivery,
                num_hidden=0 if call.num_fed is None else call.num_fed - call.prompt_len,
            )
            nodes.append(node)
            self._nodes.setdefault(node.history, []).append(node)
            self._tool_ids.update(tool.call_id for tool in message.tool_calls)
        self._by_call[call.call_id] = nodes
        for end, node in zip(ends, nodes, strict=False):
            self._texts.add(end, node)

    def mark(self, call_id: str, delivery: Delivery) -> None:
        """Note what became of a call's answer."""
        for node in self._by_call.get(call_id, ()):
            node.delivery = delivery


def rebuild(calls: Iterable[Call]) -> Forest:
    """The forest of a session's recorded calls, in order of arrival."""
    forest = Forest()
    for call in calls:
        noted = orjson.loads(call.client)
        root = Root(**noted["root"])
        new = [Message.from_json(body) for body in orjson.loads(call.messages)]
        served = [Message.from_json(body) for body in orjson.loads(call.served)]
        ends = [TextEnd(length, text) for length, text in noted.get("ends", ())]
        forest.add(call, root, noted["segment"], new, served, ends)
    return forest


def _choose(candidates: Sequence[Node]) -> Node | None:
    """One of several nodes of one text: the only one the agent has seen, or any if all their ids are the same."""
    seen = [node for node in candidates if node.delivery == "delivered"] or list(candidates)
    first = seen[0]
    if len(seen) > 1:
        ids = first.prompt_ids()
        if any(not np.array_equal(node.prompt_ids(), ids) for node in seen[1:]):
            return None
    return first
