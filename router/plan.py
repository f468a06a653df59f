"""From a request's conversation to the ids that the engine is given: extend a recorded turn, or render afresh.

In the flow: between the dialect and the engine. An extended prompt is the parent's prompt, its sampled ids verbatim,
and the ids of what the template puts behind them. Invariant: a prompt is extended only when every segment between
sampled turns is, character for character, what the template gives today; whatever fails costs a row, never tokens.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np

from rlagent.router.chat_template import TemplateError
from rlagent.router.conversation import Conversation, Message, RawPrompt, Root, history_digests
from rlagent.router.forest import Forest, Node
from rlagent.router.images import Image, places
from rlagent.router.raw_prompt import ids_behind, whole_ids, whole_text
from rlagent.router.render import Renderer, Segments
from rlagent.router.tokenizer import Tokenizer
from rlagent.types import Int32Array, Origin

Reasoning = Literal["template", "all"]
_Found = TypeVar("_Found")
# Planning hands out the texts that it needs as ids, one at a time, so that its caller decides where they are tokenised.
Steps = Generator[str, Int32Array, _Found]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A prompt: `ids` is all of it, `suffix` what follows the parent's output, `new` the messages behind the parent's."""

    ids: Int32Array
    suffix: Int32Array
    parent: Node | None
    origin: Origin
    reason: str
    segment: str
    new: tuple[Message, ...]
    images: tuple[Image, ...] = ()  # of the whole prompt, each at one placeholder, in order


def plan(forest: Forest, renderer: Renderer, conversation: Conversation, root: Root, reasoning: Reasoning) -> Plan:
    """The prompt of a request. TemplateError when the template refuses the conversation."""
    steps = _planning(forest, renderer, conversation, root, reasoning)
    try:
        text = next(steps)
        while True:
            text = steps.send(np.array(renderer.tokenizer.encode(text), np.int32))
    except StopIteration as ended:
        return _planned(ended)


async def plan_beside(
    forest: Forest, renderer: Renderer, conversation: Conversation, root: Root, reasoning: Reasoning
) -> Plan:
    """The same, long texts tokenised beside the event loop. The forest may grow meanwhile."""
    steps = _planning(forest, renderer, conversation, root, reasoning)
    try:
        text = next(steps)
        while True:
            text = steps.send(await renderer.tokenizer.encode_beside(text))
    except StopIteration as ended:
        return _planned(ended)


def _planned(ended: StopIteration) -> Plan:
    assert isinstance(ended.value, Plan)
    return ended.value


def _planning(
    forest: Forest, renderer: Renderer, conversation: Conversation, root: Root, reasoning: Reasoning
) -> Steps[Plan]:
    if conversation.prompt is not None:
        return _plan_raw(forest, renderer.tokenizer, conversation.prompt, root)
    messages = conversation.messages
    found = forest.match(messages, history_digests(messages), root)
    reason = found.reason
    if found.node is not None:
        extended = yield from _extend(found.node, renderer, conversation, reasoning)
        if isinstance(extended, Plan):
            return extended
        reason = extended
    text, segment = renderer.fresh(conversation)
    ids = yield text
    images = conversation.images
    if not _placed(images, ids, renderer):
        raise TemplateError(f"it does not show all of {len(images)} images where they stand")
    return Plan(
        ids=ids, suffix=ids, parent=None, origin="fresh", reason=reason, segment=segment, new=messages, images=images
    )


def _placed(images: Sequence[Image], ids: Int32Array, renderer: Renderer) -> bool:
    """Whether a prompt has one placeholder for each image. Without images a sampled one is text like any other."""
    return not images or (renderer.placeholder is not None and len(places(ids, renderer.placeholder)) == len(images))


def _plan_raw(forest: Forest, tokenizer: Tokenizer, prompt: RawPrompt, root: Root) -> Plan:
    """The ids of a raw prompt. The recorded `new` is what is new of its text."""
    text = whole_text(prompt, tokenizer)
    found, length = forest.match_text(text, root)
    reason = found.reason
    if found.node is not None:
        known = found.node.prompt_ids()
        suffix = ids_behind(prompt, known, length, tokenizer)
        if suffix is not None:
            return Plan(
                ids=np.concatenate([known, suffix]),
                suffix=suffix,
                parent=found.node,
                origin="extended",
                reason="",
                segment="",
                new=(Message(role="user", content=text[length:]),),
            )
        reason = "ids_differ"
    ids = whole_ids(prompt, tokenizer)
    new = (Message(role="user", content=text),)
    return Plan(ids=ids, suffix=ids, parent=None, origin="fresh", reason=reason, segment="", new=new)


def _extend(node: Node, renderer: Renderer, conversation: Conversation, reasoning: Reasoning) -> Steps[Plan | str]:
    """The plan behind `node`, or why there is none."""
    chain = node.chain
    messages = list(conversation.messages)
    for turn in chain:  # clients drop reasoning: the template decides about what was really said
        sent = messages[turn.position]
        if sent.reasoning != turn.served.reasoning:
            messages[turn.position] = replace(sent, reasoning=turn.served.reasoning)
    tokenizer = renderer.tokenizer
    stop_texts = {turn.stop_id: tokenizer.decode([turn.stop_id]) for turn in chain if turn.stop_id is not None}
    stops = [None if turn.stop_id is None else stop_texts[turn.stop_id] for turn in chain]
    positions = [turn.position for turn in chain]
    try:
        segments = renderer.segments(replace(conversation, messages=tuple(messages)), positions, stops)
    except TemplateError:
        return "template_refused"
    if segments is None or any(turn.segment != now for turn, now in zip(chain, segments.digests, strict=False)):
        return "render_differs"
    if reasoning == "template" and _dropped(chain, segments):
        return "reasoning_dropped"
    suffix = yield segments.texts[-1]
    if node.stop_id is not None:
        if not len(suffix) or not _closes(renderer, node, int(suffix[0]), reasoning):
            return "foreign_stop"
        suffix = suffix[1:]
    ids, images = node.prompt_ids(suffix), conversation.images
    if not _placed(images, ids, renderer):
        return "image_sampled"
    return Plan(
        ids=ids,
        suffix=suffix,
        parent=node,
        origin="extended",
        reason="",
        segment=segments.digests[-1],
        new=conversation.messages[node.position + 1 :],
        images=images,
    )


def _closes(renderer: Renderer, node: Node, written: int, reasoning: Reasoning) -> bool:
    """Whether the template ends the turn with the sampled stop token. A token that is only sampled stays where reasoning does."""
    if written == node.stop_id:
        return True
    return reasoning == "all" and node.stop_id is not None and renderer.stands_for(node.stop_id) == written


def _dropped(chain: Sequence[Node], segments: Segments) -> bool:
    """Whether the template leaves out reasoning that was sampled."""
    return any(
        turn.served.reasoning and turn.served.reasoning.strip() not in text
        for turn, text in zip(chain, segments.turns, strict=True)
    )
