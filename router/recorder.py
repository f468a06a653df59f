"""One call from request to record: match, render, generate, validate, parse, commit. The answer comes after the commit.

In the flow: between the app (who asks, and how the answer is written) and engines and buffer.
Invariants: a call that was answered is on disk; a call that failed left nothing; an agent that went away frees its
engine's slot and leaves an orphan at most.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import orjson

from rlagent.buffer import Buffer
from rlagent.errors import ConflictError, MovedError, RlagentError, StoreUncertainError
from rlagent.router.config import RouterConfig, SamplingConfig
from rlagent.router.conversation import Root, root_of
from rlagent.router.dialects.ask import Ask
from rlagent.router.engine_client import EngineOverflow
from rlagent.router.errors import overflow
from rlagent.router.generate import Generator
from rlagent.router.grammar import no_grammar
from rlagent.router.history import continued
from rlagent.router.live import Flight, LiveSession, sealed
from rlagent.router.parse import Event
from rlagent.router.plan import Plan, plan_beside
from rlagent.router.raw_prompt import TextEnd, text_end
from rlagent.router.reader import ChoiceReader
from rlagent.router.render import Renderer
from rlagent.router.sampling import Decision, decide
from rlagent.router.vision import Sight, Vision
from rlagent.types import Call, Choice, ParentRef

_log: Final = logging.getLogger(__name__)
OnEvents = Callable[[int, Sequence[Event]], None]

# Why a recorded turn could not be extended though the history is its own: the template's doing. Said once each.
_FULL_RENDER: Final = {
    "template_refused": "the chat template refuses a history around a recorded turn",
    "render_differs": "the chat template writes a recorded turn's surroundings differently once more messages follow",
    "foreign_stop": "the chat template does not close a turn with the stop token that the model sampled",
    "reasoning_dropped": "the chat template leaves out earlier reasoning, and router.reasoning is 'template'",
}

_UNTRAINED_IMAGES: Final = (
    "an agent sends images: they are recorded, and such rollouts are left out of training, since the learner trains text "
    "models (status counts them: rollout_dropped, images)"
)

# Names of ignored fields that are counted each by itself.
_MAX_FIELDS: Final = 256
_OTHER: Final = "(other)"

# Enough ids to hold an opened think block and the whitespace behind it.
_TAIL_IDS: Final = 8


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call before it is made: all that can be refused was refused."""

    call_id: str
    index: int
    started_at: float
    ask: Ask
    decision: Decision
    plan: Plan
    root: Root
    sight: Sight | None


class Recorder:
    """Makes and records the calls of all sessions."""

    def __init__(
        self,
        buffer: Buffer,
        generator: Generator,
        renderer: Renderer,
        router: RouterConfig,
        sampling: SamplingConfig,
        context: int,
    ) -> None:
        self._buffer = buffer
        self._generator = generator
        self._renderer = renderer
        self._router = router
        self._sampling = sampling
        self._context = context
        self._vision = Vision(buffer, generator, renderer.placeholder, router)
        self.counts: Counter[tuple[str, str]] = Counter()  # (what, which) -> how often; for /metrics
        self._fields: set[str] = set()  # ignored ones, as they are counted
        self._said: set[str] = set()  # what the log was told once
        if not renderer.family_known:
            self._say_once(
                "the chat template has no marks of a known model family: answers are served as text, tool calls are not "
                "read; set router.family to one of hermes, llama3, deepseek, glm, mistral, harmony if it writes like it"
            )

    def decide(self, live: LiveSession, ask: Ask) -> Decision:
        """The sampling in effect for a request."""
        trained = live.session.train and ask.model not in self._router.untrained_models
        return decide(ask.asked, self._sampling, live.session.sampling, trained=trained)

    async def complete(self, live: LiveSession, ask: Ask) -> Ask:
        """The request with the history that it names. A 400 where it asks for what the engines do not have."""
        if ask.grammar is not None and not await self._generator.has_grammar():
            raise no_grammar()
        if ask.previous is not None:
            known = "\0" not in ask.previous  # which no store can look up
            chain = await self._buffer.chain(live.session.session_id, ask.previous) if known else []
            ask = replace(ask, conversation=continued(ask.conversation, ask.num_lead, ask.previous, chain))
        await self._vision.check(ask.conversation)
        return ask

    async def recorded(self, session_id: str, call_id: str) -> Call | None:
        """A call of a session, open or not."""
        return await self._buffer.call(session_id, call_id)

    async def num_prompt_tokens(self, live: LiveSession, ask: Ask) -> int:
        """How long the prompt of a request would be, as the model would see it."""
        await self._vision.check(ask.conversation)
        found = (await self._plan(live, ask))[0]
        if not found.images:
            return len(found.ids)
        return await self._vision.measure(live.session, found)

    async def _plan(self, live: LiveSession, ask: Ask) -> tuple[Plan, Root]:
        root = root_of(ask.model, ask.conversation, self._renderer.digest)
        found = await plan_beside(live.forest, self._renderer, ask.conversation, root, self._router.reasoning)
        return found, root

    def begin(self, live: LiveSession, ask: Ask, decision: Decision, on_events: OnEvents | None) -> tuple[Flight, bool]:
        """Start the call that answers a request; for an SDK's retry, the one made or being made for it before.

        Second: whether the call is new. Only then `on_events` gets what is read while it is sampled.
        """
        if ask.retry_count:
            done = live.answered.get(ask.body_digest)
            if done is not None:
                self.counts["retries", "replayed"] += 1
                replay = Flight(call_id=done.call_id, started_at=done.started_at, prompt_len=done.num_prompt_tokens)
                replay.future = asyncio.get_running_loop().create_future()
                replay.future.set_result(done)
                return replay, False
            running = live.flights.get(ask.body_digest)
            if running is not None:
                self.counts["retries", "joined"] += 1
                return running, False
        flight = Flight(call_id=f"{ask.id_prefix}{uuid.uuid4().hex}", started_at=time.time())
        flight.future = asyncio.create_task(self._make(live, flight, ask, decision, on_events))
        live.flights[ask.body_digest] = flight
        live.tasks.add(flight.future)
        flight.future.add_done_callback(lambda _: self._landed(live, ask.body_digest, flight))
        return flight, True

    async def join(self, live: LiveSession, flight: Flight) -> Call:
        """The committed call. The last waiter to go away takes the call with it, unless it is being committed."""
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.future)
        except asyncio.CancelledError:
            if flight.future.cancelled():
                raise sealed(live.session) from None  # it was finished under the call
            flight.waiters -= 1
            if flight.waiters == 0 and not flight.future.cancel() and flight.future.exception() is None:
                self.lost(live, flight.call_id)  # it had landed in this very moment
            raise

    def _landed(self, live: LiveSession, body_digest: str, flight: Flight) -> None:
        live.tasks.discard(flight.future)
        if live.flights.get(body_digest) is flight:
            del live.flights[body_digest]
        if not flight.future.cancelled() and flight.future.exception() is None and flight.waiters == 0:
            self.lost(live, flight.call_id)

    async def _prepare(self, live: LiveSession, flight: Flight, ask: Ask, decision: Decision) -> Prepared:
        found, root = await self._plan(live, ask)
        flight.prompt_len = len(found.ids)
        hidden = 0 if found.parent is None else found.parent.num_hidden
        decision = self._fitted(decision, len(found.ids) + hidden)
        self._count(ask, decision, found, train=live.session.train)
        sight = await self._vision.sight(found, flight.set_prompt_len)
        return Prepared(
            call_id=flight.call_id,
            index=live.forest.take_index(),
            started_at=flight.started_at,
            ask=ask,
            decision=decision,
            plan=found,
            root=root,
            sight=sight,
        )

    def _fitted(self, decision: Decision, prompt_len: int) -> Decision:
        """No more tokens than fit behind a prompt. 400 where none do."""
        room = self._context - prompt_len
        if room < 1:
            raise overflow(
                f"This model's maximum context length is {self._context} tokens. However, your messages resulted in "
                f"{prompt_len} tokens. Please reduce the length of the messages."
            )
        if decision.sampling.max_tokens > room:
            return replace(decision, sampling=replace(decision.sampling, max_tokens=room))
        return decision

    def _say_once(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            _log.warning(what)

    def _count(self, ask: Ask, decision: Decision, found: Plan, *, train: bool) -> None:
        self.counts["calls", found.origin if found.origin == "extended" else f"fresh:{found.reason}"] += 1
        if not self._renderer.family_known:
            self.counts["unknown_family", "calls"] += 1
        if found.reason in _FULL_RENDER:
            self.counts["full_renders", found.reason] += 1
            self._say_once(
                f"{_FULL_RENDER[found.reason]}: such turns are rendered in full and start a new row; `rlagent doctor` "
                "shows where"
            )
        if found.images:
            self.counts["images", "calls"] += 1
            if train and decision.exact:
                self._say_once(_UNTRAINED_IMAGES)
        for name in decision.overridden:
            self.counts["overridden", name] += 1
        for name in ask.ignored:
            self.counts["ignored_fields", self._field(name[:64])] += 1

    def _field(self, name: str) -> str:
        """The name under which an ignored field is counted: clients invent them, so there is an end to it."""
        self._fields.add(name if len(self._fields) < _MAX_FIELDS else _OTHER)
        return name if name in self._fields else _OTHER

    async def _make(
        self, live: LiveSession, flight: Flight, ask: Ask, decision: Decision, on_events: OnEvents | None
    ) -> Call:
        """Plan, generate, read and commit."""
        prepared = await self._prepare(live, flight, ask, decision)
        found = prepared.plan
        tail = self._renderer.tokenizer.decode(found.ids[-_TAIL_IDS:].tolist())
        think = self._renderer.output_form.think[0]
        readers = [
            ChoiceReader(
                self._renderer.tokenizer,
                tools=ask.tools,
                form=ask.form,
                thinking=bool(think) and tail.rstrip().endswith(think),
                stops=prepared.decision.sampling.stop,
                family=self._renderer.output_form,
                schemas=ask.conversation.tools,
            )
            for _ in range(ask.n)
        ]
        try:
            choices = await self._sample(live, prepared, readers, on_events)
        except EngineOverflow:  # nothing was sampled yet
            if prepared.sight is None:
                raise
            num_fed = await self._vision.measure(live.session, found)
            prepared = replace(prepared, decision=self._fitted(decision, num_fed))
            choices = await self._sample(live, prepared, readers, on_events)
        sight = prepared.sight
        served = [reader.message for reader in readers]
        ends = [] if ask.conversation.prompt is None else [self._text_end(found, choice) for choice in choices]
        call = Call(
            call_id=prepared.call_id,
            session_id=live.session.session_id,
            index=prepared.index,
            dialect=ask.dialect,
            model=ask.model,
            parent=None
            if found.parent is None
            else ParentRef(call_id=found.parent.call_id, choice=found.parent.choice),
            origin=found.origin,
            reason=found.reason,
            prompt_suffix=found.suffix,
            prompt_len=len(found.ids),
            choices=tuple(map(_read, choices, readers)),
            sampling=prepared.decision.sampling,
            messages=orjson.dumps([message.to_json() for message in found.new]),
            served=orjson.dumps([message.to_json() for message in served]),
            started_at=prepared.started_at,
            finished_at=time.time(),
            body_digest=ask.body_digest,
            client=_client_note(prepared, ends),
            images=() if sight is None else sight.behind(len(found.ids) - len(found.suffix)),
            num_fed=None if sight is None else sight.num_fed,
        )
        await self._commit(live, call, {} if sight is None else sight.blobs)
        live.forest.add(call, prepared.root, found.segment, found.new, served, ends)
        live.remember(call)
        return call

    def _text_end(self, found: Plan, choice: Choice) -> TextEnd:
        """Where the text of a raw prompt's completion ends."""
        return text_end(self._renderer.tokenizer.decode([*found.ids.tolist(), *choice.output_ids.tolist()]))

    async def _commit(self, live: LiveSession, call: Call, images: Mapping[str, bytes]) -> None:
        try:
            await _to_the_end(self._buffer.record_call(call, epoch=live.epoch, images=images))
        except (MovedError, StoreUncertainError):
            live.distrust()  # another replica goes on with it, or the record may hold this call
            raise
        except ConflictError as error:
            raise sealed(live.session) from error

    async def _sample(
        self, live: LiveSession, prepared: Prepared, readers: Sequence[ChoiceReader], on_events: OnEvents | None
    ) -> list[Choice]:
        """One engine request for each choice, all at once; the first failure ends the others."""
        if len(readers) == 1:
            return [await self._choice(live, prepared, 0, readers[0], on_events)]
        tasks = [
            asyncio.create_task(self._choice(live, prepared, number, reader, on_events))
            for number, reader in enumerate(readers)
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _choice(
        self, live: LiveSession, prepared: Prepared, number: int, reader: ChoiceReader, on_events: OnEvents | None
    ) -> Choice:
        def on_ids(ids: Sequence[int]) -> None:
            assert on_events is not None
            events = reader.feed(ids)
            if events:
                on_events(number, events)

        sampling = prepared.decision.sampling
        if sampling.seed is not None:
            sampling = replace(sampling, seed=sampling.seed + number)
        ask = prepared.ask
        trainable = prepared.decision.exact and ask.grammar is None and ask.model not in self._router.untrained_models
        choice = await self._generator.choice(
            f"{prepared.call_id}.{number}",
            live.session.session_id,
            live.session.group_id,
            prepared.plan.ids,
            sampling,
            num_new=len(prepared.plan.suffix),
            trainable=trainable,
            schema=None if ask.grammar is None else ask.grammar.schema,
            on_ids=None if on_events is None else on_ids,
            shown=prepared.sight,
        )
        events = reader.finish(choice)
        if on_events is not None and events:
            on_events(number, events)
        self.counts["choices", choice.finish_reason] += 1
        self.counts["tokens", "sampled"] += len(choice.output_ids)
        return choice

    def delivered(self, live: LiveSession, call_id: str) -> None:
        """The agent has seen the end of the answer."""
        self._mark(self._buffer.mark_delivered, call_id)
        live.forest.mark(call_id, "delivered")

    def lost(self, live: LiveSession, call_id: str) -> None:
        """The agent went away before the end of the answer."""
        self.counts["deliveries", "orphan"] += 1
        self._mark(self._buffer.mark_orphan, call_id)
        live.forest.mark(call_id, "orphan")

    def _mark(self, mark: Callable[[str], None], call_id: str) -> None:
        try:
            mark(call_id)
        except RlagentError:  # the buffer is closed or full: the call stays committed, which loses nothing
            self.counts["deliveries", "unmarked"] += 1


def _read(choice: Choice, reader: ChoiceReader) -> Choice:
    """The choice with how it parsed."""
    return choice if choice.parse_status == reader.status else replace(choice, parse_status=reader.status)


async def _to_the_end(commit: asyncio.Future[None]) -> None:
    """Await a commit to its end, whoever goes away meanwhile: it takes effect or fails, never in between."""
    while not commit.done():
        try:
            await asyncio.shield(commit)
        except asyncio.CancelledError:
            if commit.cancelled():
                raise
    commit.result()


def _client_note(prepared: Prepared, ends: Sequence[TextEnd]) -> bytes:
    """What the record keeps beside the call: wishes not granted, and what a rebuild of the forest needs."""
    ask, root = prepared.ask, prepared.root
    wishes = {
        "temperature": ask.asked.temperature,
        "top_p": ask.asked.top_p,
        "top_k": ask.asked.top_k,
        "seed": ask.asked.seed,
        "max_tokens": ask.asked.max_tokens,
        **(ask.asked.other or {}),
    }
    note = {
        "asked": {name: value for name, value in wishes.items() if value is not None},
        "overridden": prepared.decision.overridden,
        "ignored": dict(ask.ignored),
        "tools": ask.tools,
        "logprobs": ask.logprobs,
        **({"ends": [[end.length, end.digest] for end in ends]} if ends else {}),
        **({"num_lead": ask.num_lead} if ask.num_lead else {}),
        **({"echo": ask.echo} if ask.echo else {}),
        **({} if ask.grammar is None else {"json_schema": ask.grammar.schema}),
        "root": {"model": root.model, "tools": root.tools, "template": root.template},
        "segment": prepared.plan.segment,
    }
    return orjson.dumps(note)
