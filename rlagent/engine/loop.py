"""The thread that owns torch: runs the scheduler's steps, and between them whatever the HTTP side asks for.

Invariant: model, cache and scheduler are touched by this thread alone; everything comes in through one queue and goes out through
the event loop.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, TypeVar

import torch
from tokenizers import Tokenizer

from rlagent.engine.architecture import Architecture
from rlagent.engine.cache import KVCache
from rlagent.engine.checkpoint import load_checkpoint
from rlagent.engine.config import EngineConfig
from rlagent.engine.model import Model
from rlagent.engine.scheduler import Scheduler
from rlagent.engine.sequence import Sequence
from rlagent.engine.updates import WeightUpdates
from rlagent.errors import EngineError

_log: Final = logging.getLogger(__name__)
T = TypeVar("T")
PauseMode = Literal["abort", "retract", "in_place"]
PAUSE_MODES: Final = ("abort", "retract", "in_place")


class Engine:
    """Model, scheduler and weight updates, and the thread that runs them. Made by `Engine.load`, ended by `close`."""

    def __init__(self, model: Model, tokenizer: Tokenizer | None, config: EngineConfig, version: str) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.config = config
        self._cache = KVCache(
            model.architecture, max_running=config.max_running, max_total_tokens=config.max_total_tokens,
            dtype=model.dtype, device=model.device,
        )  # fmt: skip
        self.scheduler = Scheduler(model, self._cache, tokenizer, prefill_tokens=config.prefill_tokens, version=version)
        self.updates = WeightUpdates(model)
        self.paused = False
        self.released = False
        self.num_steps = 0
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._failure: Exception | None = None
        self.failed = asyncio.Event()

    @classmethod
    def load(cls, config: EngineConfig, model_dir: Path, version: str) -> "Engine":
        """Load a model directory. LoadError when it is not one the engine runs."""
        architecture = Architecture.load(model_dir)
        use_cuda = torch.cuda.is_available() if config.device == "auto" else config.device == "cuda"
        device = torch.device("cuda" if use_cuda else "cpu")
        model = Model(architecture, dtype=getattr(torch, config.dtype), device=device)
        load_checkpoint(model, model_dir)
        tokenizer_file = model_dir / "tokenizer.json"
        tokenizer = Tokenizer.from_file(str(tokenizer_file)) if tokenizer_file.is_file() else None
        return cls(model, tokenizer, config, version)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; what still runs is dropped."""
        self._inbox.put(None)
        self._thread.join()

    @property
    def healthy(self) -> bool:
        """Whether the thread still steps."""
        return self._failure is None

    def ensure_healthy(self) -> None:
        """EngineError once a step has failed."""
        if self._failure is not None:
            raise EngineError(f"the engine failed ({self._failure!r}); restart it")

    def submit(self, sequence: Sequence) -> None:
        """Queue a request; its `emit` is called in the engine's thread."""
        self.ensure_healthy()
        self._inbox.put(lambda: self.scheduler.add(sequence))

    async def call(self, work: Callable[[], T]) -> T:
        """Run `work` in the engine's thread, between steps."""
        self.ensure_healthy()
        done: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                self.ensure_healthy()
                result = work()
            except Exception as error:  # carried to whoever asked
                self._loop.call_soon_threadsafe(_set_exception, done, error)
            else:
                self._loop.call_soon_threadsafe(_set_result, done, result)

        self._inbox.put(run)
        return await done

    # Control; these run in the engine's thread, through `call`.

    def pause(self, mode: PauseMode) -> None:
        """Stop generating: abort ends what is under way, retract forgets its keys and values, in_place keeps them."""
        self.paused = True
        if mode == "abort":
            self.scheduler.abort(lambda _: True, "aborted: generation was paused")
        elif mode == "retract":
            self.scheduler.retract_all()

    def resume(self) -> None:
        """Generate again. EngineError while an update is open: half-new weights never serve."""
        if self.updates.open:
            raise EngineError(
                "a weight update is open; end it, or reload by /update_weights_from_disk, before continuing"
            )
        self.paused = False

    def end_update(self) -> str:
        """Put the staged weights in place; the version now in force."""
        version = self.updates.end() or self.scheduler.version
        self.scheduler.weights_changed(version)
        return version

    def load_from_disk(self, model_dir: Path, version: str | None) -> None:
        """Load a full checkpoint. On failure the old weights stay."""
        self.updates.from_disk(model_dir)
        self.scheduler.weights_changed(version if version is not None else self.scheduler.version)

    def flush_cache(self) -> bool:
        """Forget retained prefixes; False while requests run."""
        if self.scheduler.running:
            return False
        self._cache.flush()
        return True

    def release_memory(self) -> None:
        """Give the KV cache's memory back."""
        if self.scheduler.running:
            raise EngineError("requests are running; pause with mode 'abort' or 'retract' first")
        self._cache.release()
        self.released = True

    def resume_memory(self) -> None:
        """Take the KV cache's memory again."""
        self._cache.restore()
        self.released = False

    def _run(self) -> None:
        torch.set_num_threads(self.config.threads)  # inside the thread: OpenMP keeps its team per thread
        try:
            while self._drain():
                self.scheduler.step()
                self.num_steps += 1
        except Exception as error:  # the boundary of the thread: the server answers 503 from now on, and nobody waits
            _log.exception("the engine's thread failed")
            self._failure = error
            self._loop.call_soon_threadsafe(self.failed.set)
            while True:
                self.scheduler.fail(f"the engine failed ({error!r})")
                work = self._inbox.get()
                if work is None:
                    return
                work()

    def _drain(self) -> bool:
        """Do what is asked; blocks while there is nothing to generate. False at the end."""
        while True:
            idle = self.paused or self.released or not self.scheduler.busy
            try:
                work = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if work is None:
                return False
            work()


def _set_result(future: "asyncio.Future[T]", result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: "asyncio.Future[T]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
