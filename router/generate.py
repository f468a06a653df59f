"""One choice from the engines: sticky, resumed when an engine aborts it, moved when an engine dies.

In the flow: the recorder asks for each choice of a call. An abort by the engine (a weight update) keeps the partial
output and asks for the rest behind it, so that one completion may have several version spans.
Invariant: the result is one sequence of ids, each with the logprob and version of the engine that sampled it; ids past
a stop are excluded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np

from rlagent.errors import EngineError
from rlagent.router.balance import NoEngine, Pool
from rlagent.router.engine_client import Engine, EngineDown, Part, StalePrefix
from rlagent.router.tokenizer import Tokenizer
from rlagent.types import Choice, FinishReason, Int16Array, Int32Array, Sampling, VersionSpan

OnIds = Callable[[Sequence[int]], None]

# Weight updates within one call: each resumes it. More than this is an engine that refuses to run it.
MAX_RESUMES: Final = 1000
# An engine that aborts without having sampled anything is busy with an update: ask it again after this pause.
RESUME_PAUSE_S: Final = 0.05
# Engines that broke off one call, before its agent is told to try again later.
MAX_FAILURES: Final = 4
# An engine tells how far a call that nobody streams has come after so many tokens at least, and so often at most: what it
# has told outlives it. An engine repeats the whole output each time, so a long one is told of less often.
_TOLD_EVERY: Final = 64
_MAX_TOLD: Final = 16
# With images an engine repeats the whole prompt as well.
_SHOWN_EVERY: Final = 8


class Shown(Protocol):
    """The images of a prompt, which engines are given beside its ids."""

    @property
    def uris(self) -> Sequence[str]:
        """As data: URIs, one for each placeholder of the prompt."""

    @property
    def placeholder(self) -> int:
        """The id that stands for an image."""

    def told(self, ids: Int32Array, seen: Sequence[int] | None) -> None:
        """What an engine says that its model saw of these ids. RecordingError where it is anything else."""


@dataclass(slots=True, kw_only=True)
class _Output:
    """What was sampled so far, over all requests of one choice."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    experts: list[Int16Array] = field(default_factory=list)

    @property
    def num_routed(self) -> int:
        """Of how many tokens the experts are known."""
        return sum(map(len, self.experts))

    def extend(self, part: Part) -> None:
        if part.experts is not None and part.ids:  # of an abort within the prompt they are not whole
            self.experts.append(part.experts)
        start = len(self.ids)
        self.ids += part.ids
        self.logprobs += part.logprobs
        for span in part.spans:
            moved = VersionSpan(version=span.version, start=span.start + start, end=span.end + start)
            if self.spans and self.spans[-1].version == moved.version:
                moved = VersionSpan(version=moved.version, start=self.spans.pop().start, end=moved.end)
            self.spans.append(moved)

    def cut(self, length: int) -> None:
        del self.ids[length:], self.logprobs[length:]
        self.spans = [
            VersionSpan(version=span.version, start=span.start, end=min(span.end, length))
            for span in self.spans
            if span.start < length
        ]

    def choice(
        self,
        reason: FinishReason,
        matched: int | str | None,
        *,
        trainable: bool,
        num_prompt: int,
        experts_from: int | None,
    ) -> Choice:
        experts = None
        if self.experts and experts_from is not None:
            experts = predictors(np.concatenate(self.experts), num_prompt + len(self.ids), experts_from)
        return Choice(
            experts=experts,
            output_ids=np.array(self.ids, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            versions=tuple(self.spans),
            finish_reason=reason,
            matched_stop=matched,
            trainable=trainable,
        )


def predictors(experts: Int16Array, num_tokens: int, experts_from: int) -> Int16Array:
    """Experts of the tokens from max(experts_from, 0) on -> a row for each token from experts_from + 1 to the last of
    `num_tokens`: the experts of the token before it. -1 where they are not known; the first token of all has none before it.
    """
    found = np.full((num_tokens - 1 - experts_from, experts.shape[1]), -1, np.int16)
    first = max(0, -experts_from)
    known = experts[: len(found) - first]
    found[first : first + len(known)] = known
    return found


class Generator:
    """Makes choices on a pool of engines. record_experts: engines are asked which experts they gave to each token."""

    def __init__(self, pool: Pool, tokenizer: Tokenizer, *, record_experts: bool = False) -> None:
        self._pool = pool
        self._tokenizer = tokenizer
        self._record_experts = record_experts

    async def choice(
        self,
        rid: str,
        session_id: str,
        group_id: str | None,
        prompt: Int32Array,
        sampling: Sampling,
        *,
        num_new: int,
        trainable: bool,
        schema: str | None = None,
        on_ids: OnIds | None = None,
        shown: Shown | None = None,
    ) -> Choice:
        """Sample one choice. `on_ids` gets new ids as they arrive. NoEngine when no engine can.

        shown: its images; it is told how the model saw the prompt, before anything is sampled.

        num_new: ids at the end of the prompt that no recorded call holds; experts are recorded from the token before them on.
        schema: a JSON schema for the engine's grammar, which begins with the output: an aborted output is then sampled
        anew, and told at its end.
        """
        on_ids = on_ids if schema is None else None
        experts_from = len(prompt) - num_new - 1 if self._record_experts else None

        def made(reason: FinishReason, matched: int | str | None) -> Choice:
            return output.choice(
                reason, matched, trainable=trainable, num_prompt=len(prompt), experts_from=experts_from
            )

        output = _Output()
        avoid: set[Engine] = set()
        failures = 0
        for attempt in range(MAX_RESUMES):
            if attempt and len(output.ids) >= sampling.max_tokens:
                return made("length", None)
            engine = await self._pick(session_id, group_id, avoid)
            ids = np.concatenate([prompt, np.array(output.ids, np.int32)]) if output.ids else prompt
            if shown is not None and shown.placeholder in output.ids:
                raise EngineError(
                    "the policy sampled an image's placeholder and was then interrupted: engines cannot go on behind it; send the "
                    "request again"
                )
            params = _params(sampling, sampling.max_tokens - len(output.ids), len(output.ids), schema)
            if shown is not None:
                params["stream_interval"] = _SHOWN_EVERY
            if on_ids is None:
                params["stream_interval"] = max(_TOLD_EVERY, params["max_new_tokens"] // _MAX_TOLD)
            # Of what was sampled before an abort, the experts are those it was sampled with.
            unknown = None if experts_from is None else max(0, experts_from) + output.num_routed
            engine.running += 1
            try:
                part = await self._request(engine, f"{rid}-{attempt}", ids, params, output, on_ids, unknown, shown)
            except StalePrefix:
                continue
            finally:
                engine.running -= 1
            if part is None:
                avoid.add(engine)
                failures += 1
                if failures == MAX_FAILURES:
                    raise NoEngine(f"engines broke off this call {failures} times; see their logs")
                continue
            output.extend(part)
            assert part.finish is not None
            ended = self._ended(output, part, sampling, resumed=attempt > 0)
            if ended is not None:
                return made(*ended)
            if schema is not None:
                output = _Output()
            if not part.ids:
                await asyncio.sleep(RESUME_PAUSE_S)
        raise EngineError(f"the engines aborted a call {MAX_RESUMES} times; see their logs")

    async def has_grammar(self) -> bool:
        """Whether every engine that takes requests takes a grammar. NoEngine where one does not answer."""
        return await self._all(Engine.has_grammar)

    async def sees_images(self) -> bool:
        """Whether every engine that takes requests takes images. NoEngine where one does not answer."""
        return await self._all(Engine.sees_images)

    async def _all(self, able: Callable[[Engine], Coroutine[Any, Any, bool]]) -> bool:
        try:
            return all(await asyncio.gather(*map(able, self._pool.ready)))
        except EngineDown as error:
            raise NoEngine(f"{error}; try again in a few seconds") from error

    async def _pick(self, session_id: str, group_id: str | None, avoid: set[Engine]) -> Engine:
        try:
            return await self._pool.pick(session_id, group_id, avoid)
        except NoEngine:
            if not any(engine.state == "ready" for engine in avoid):
                raise
            avoid.clear()  # an engine that failed this call has come back
            return await self._pool.pick(session_id, group_id)

    async def _request(
        self, engine: Engine, rid: str, ids: Int32Array, params: dict[str, Any], output: _Output, on_ids: OnIds | None,
        experts_from: int | None, shown: Shown | None,
    ) -> Part | None:  # fmt: skip
        """One request to its end; None when the engine broke off (what it had told is kept in `output`)."""
        part: Part | None = None
        whole: Part | None = None  # the last one of which it is known which version sampled which token
        versions: set[int] = set()
        seen, told = 0, False
        try:
            images = () if shown is None else shown.uris
            async for part in engine.stream(rid, ids, params, experts_from=experts_from, images=images):
                if shown is not None and not told:
                    shown.told(ids, part.prompt)
                    told = True
                if on_ids is not None:
                    on_ids(_without_stop(part)[seen:])
                    seen = len(part.ids)
                if part.finish is None:
                    versions.update(span.version for span in part.spans)
                    whole = part if len(versions) == 1 else whole
            return part
        except EngineDown as error:
            await self._lost(engine)
            if len(versions) > 1 and on_ids is not None:  # which version sampled which token is told at the end only
                raise EngineError(f"{error}; the call spans a weight update and cannot be moved") from error
            if whole is not None and "json_schema" not in params:
                output.extend(whole)
            return None
        except asyncio.CancelledError:
            self._pool.spawn(engine.abort(rid))
            raise

    async def _lost(self, engine: Engine) -> None:
        """An engine broke off: out of rotation, unless it answers that it is well."""
        if not await engine.healthy():
            engine.lose()
            await self._pool.announce()

    def _ended(
        self, output: _Output, part: Part, sampling: Sampling, *, resumed: bool
    ) -> tuple[FinishReason, int | str | None] | None:
        """Why the choice ended; None when it goes on.

        A stop string is sought again: it may begin before a resume, and an engine may sample past it within one step.
        """
        assert part.finish is not None
        if sampling.stop and (resumed or isinstance(part.finish.get("matched"), str)):
            found = self._cut_at_stop(output, sampling.stop)
            if found is not None:
                return "stop", found
        kind = part.finish.get("type")
        if kind == "stop":
            return "stop", part.finish.get("matched")
        if kind == "length" or len(output.ids) >= sampling.max_tokens:
            return "length", None
        return None

    def _cut_at_stop(self, output: _Output, stops: Sequence[str]) -> str | None:
        """Cut the output behind the token that completes the first stop string."""
        text = self._tokenizer.decode(output.ids)
        found = min((stop for stop in stops if stop in text), key=text.index, default=None)
        if found is None:
            return None
        low, high = 1, len(output.ids)  # the fewest ids whose text holds it
        while low < high:
            middle = (low + high) // 2
            if found in self._tokenizer.decode(output.ids[:middle]):
                high = middle
            else:
                low = middle + 1
        output.cut(low)
        return found


def _without_stop(part: Part) -> list[int]:
    """The ids that an agent may see."""
    ended = (
        part.finish is not None and part.finish.get("type") == "stop" and isinstance(part.finish.get("matched"), int)
    )
    return part.ids[:-1] if ended else part.ids


def _params(sampling: Sampling, budget: int, sampled: int, schema: str | None) -> dict[str, Any]:
    """SGLang's sampling_params. A resumed call must not draw what it drew before, so its seed moves on."""
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": budget,
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
    if schema is not None:
        params["json_schema"] = schema
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed + sampled
    return params
