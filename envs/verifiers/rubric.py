"""Checks with weights, composed into one reward; each with a time limit, bounded concurrency and a cache.

Invariant: `Rubric.reward` gives a reward whatever its verifiers do. One that hangs, crashes, raises or answers no finite
number has failed: its component takes the check's `on_failure`, and how it failed is in `Reward.failed`, which the run counts.
"""

import asyncio
import logging
import math
import numbers
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from hashlib import sha256
from types import TracebackType
from typing import Final, Literal, Self

import orjson

from rlagent.envs.verifiers.attempt import Attempt, Staged, Verifier
from rlagent.errors import ConfigError, VerifierCrashError, VerifierError
from rlagent.types import Reward

_log: Final = logging.getLogger(__name__)
_READY_S: Final = 120.0  # for a place: a process that imports sympy on a busy machine, a sandbox of a full pool
_CANCEL_S: Final = 1.0  # for one that was told to end; then it is left to itself

Failure = Literal["waiting", "timeout", "crash", "error", "invalid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One component of a reward: `weight` times what the verifier answers, or times `on_failure` where it fails.

    concurrency bounds how many attempts it looks at side by side (a `Staged` verifier has a bound of its own too).
    cache: the same task, answer and conversation is asked about once; not for a judge that is to be asked anew.
    """

    name: str
    verifier: Verifier
    weight: float = 1.0
    timeout_s: float = 30.0
    on_failure: float = 0.0
    concurrency: int = 16
    cache: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    value: float
    failure: Failure | None = None


class Rubric:
    """The reward of an attempt from named checks, and rewards of its single calls from `steps`.

    An async context manager; a rollout file may also keep one for its process's life, whose end takes everything with it.
    """

    def __init__(self, checks: Sequence[Check], *, steps: Sequence[Check] = (), cache_size: int = 4096) -> None:
        names = [check.name for check in (*checks, *steps)]
        if not names or len(names) != len(set(names)):
            raise ConfigError(f"checks are named {names}; give at least one, each with a name of its own")
        self._checks = tuple(checks)
        self._steps = tuple(steps)
        self._cache_size = cache_size
        self._cache: OrderedDict[bytes, float] = OrderedDict()
        self._turns = {check.name: asyncio.Semaphore(_places(check)) for check in (*checks, *steps)}
        self._left: set[asyncio.Task[float]] = set()  # verifiers that do not end when told to
        self.failures: Counter[tuple[str, Failure]] = Counter()  # (check, how) -> how often
        self.num_cached = 0  # answers that the cache had

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End what the verifiers hold."""
        for check in (*self._checks, *self._steps):
            if isinstance(check.verifier, Staged):
                await check.verifier.close()

    async def reward(self, attempt: Attempt) -> Reward:
        """The reward of one attempt. Raises VerifierError only for steps whose calls are not named."""
        steps = attempt.steps() if self._steps else []
        jobs = [self._verdict(check, attempt) for check in self._checks]
        jobs += [self._verdict(check, step) for _, step in steps for check in self._steps]
        verdicts = await asyncio.gather(*jobs)
        found = dict(zip((check.name for check in self._checks), verdicts, strict=False))
        failed = {name: verdict.failure for name, verdict in found.items() if verdict.failure is not None}
        calls: dict[str, float] = {}
        left = iter(verdicts[len(self._checks) :])
        for call_id, _ in steps:
            for check in self._steps:
                verdict = next(left)
                calls[call_id] = calls.get(call_id, 0.0) + check.weight * verdict.value
                if verdict.failure is not None:
                    failed[check.name] = verdict.failure
        components = {check.name: check.weight * found[check.name].value for check in self._checks}
        return Reward(components=components, calls=calls, failed=failed)

    async def _verdict(self, check: Check, attempt: Attempt) -> _Verdict:
        key = _key(check, attempt) if check.cache else None
        async with self._turns[check.name]:
            if key is not None and key in self._cache:
                self._cache.move_to_end(key)
                self.num_cached += 1
                return _Verdict(value=self._cache[key])
            verdict = await self._ask(check, attempt)
        if key is not None and verdict.failure is None:
            self._cache[key] = verdict.value
            if len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        return verdict

    async def _ask(self, check: Check, attempt: Attempt) -> _Verdict:
        failure: Failure = "waiting"
        try:
            async with AsyncExitStack() as stack:
                verifier = check.verifier
                if isinstance(verifier, Staged):
                    async with asyncio.timeout(_READY_S):
                        verifier = await stack.enter_async_context(verifier.ready())
                failure = "timeout"
                value = await self._bounded(verifier, attempt, check.timeout_s)
            failure = "invalid"
            return _Verdict(value=_finite(value))
        except TimeoutError:
            return self._failed(check, failure, f"after {check.timeout_s} s")
        except VerifierCrashError as error:
            return self._failed(check, "crash", str(error))
        except Exception as error:  # the boundary to the verifier: raising is data
            return self._failed(
                check, "invalid" if failure == "invalid" else "error", f"{type(error).__name__}: {error}"
            )

    def _failed(self, check: Check, how: Failure, why: str) -> _Verdict:
        self.failures[check.name, how] += 1
        _log.warning("verifier %s failed (%s): %s", check.name, how, why)
        return _Verdict(value=check.on_failure, failure=how)

    async def _bounded(self, verifier: Verifier, attempt: Attempt, timeout_s: float) -> float:
        """The verifier's value, within the time, also where it does not end when it is cancelled."""
        task = asyncio.create_task(_call(verifier, attempt))
        try:
            done, _ = await asyncio.wait({task}, timeout=timeout_s)
            if done:
                return task.result()
            raise TimeoutError
        finally:
            if task.cancel():
                self._left.add(task)
                task.add_done_callback(self._left.discard)
                await asyncio.wait({task}, timeout=_CANCEL_S)


async def _call(verifier: Verifier, attempt: Attempt) -> float:
    value = verifier(attempt)
    return await value if isinstance(value, Awaitable) else value


def _finite(value: object) -> float:
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value)
    raise VerifierError(f"a verifier answers a finite number, not {value!r:.200}")


def _places(check: Check) -> int:
    if check.concurrency < 1 or check.timeout_s <= 0:
        raise ConfigError(
            f"check {check.name!r} has concurrency {check.concurrency} and timeout_s {check.timeout_s}; both must be positive"
        )
    return (
        min(check.concurrency, check.verifier.concurrency) if isinstance(check.verifier, Staged) else check.concurrency
    )


def _key(check: Check, attempt: Attempt) -> bytes | None:
    """What the cache knows an attempt by; None for one that is not JSON."""
    try:
        seen = orjson.dumps(
            [check.name, dict(attempt.task), attempt.answer, [dict(message) for message in attempt.messages]],
            option=orjson.OPT_SORT_KEYS,
        )
    except TypeError:
        return None
    return sha256(seen).digest()
