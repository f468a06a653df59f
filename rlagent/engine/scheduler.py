"""Continuous batching: which sequences are computed next, and what happens to them.

One `step` prefills up to a budget of prompt tokens, then decodes one token of every sequence that is ready. Sequences join and leave
between steps. Owned by the engine's thread; nothing here is safe from another.
Invariant: running[i] has its keys and values in cache row i.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import torch
from tokenizers import Tokenizer

from rlagent.engine.cache import KVCache
from rlagent.engine.model import Chunk, Model
from rlagent.engine.sampling import sample
from rlagent.engine.sequence import Sequence
from rlagent.engine.stops import Stop, find_stop

# A waiting prompt that shares this many more tokens with one just being computed than with the cache waits for it: shared
# prompts are computed once.
_WORTH_WAITING: Final = 32


class Scheduler:
    """The waiting and the running, and the cache between them."""

    def __init__(
        self, model: Model, cache: KVCache, tokenizer: Tokenizer | None, *, prefill_tokens: int, version: str
    ) -> None:
        self.model = model
        self.cache = cache
        self.version = version
        self.epoch = 0  # counts weight updates: keys and values of another epoch are never shared
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._tokenizer = tokenizer
        self._prefill_tokens = prefill_tokens
        self._eos_ids = frozenset(model.architecture.eos_ids)

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a request."""
        self.waiting.append(sequence)

    def step(self) -> None:
        """Admit, prefill, decode, sample, and end what is done."""
        self._admit()
        chunks = list(self._prefill_chunks())
        prefilling = {chunk.row for chunk in chunks}
        alone = any(_wants_score(self.running[row]) for row in prefilling)
        decode_rows = [
            row
            for row, seq in enumerate(self.running)
            if not alone and row not in prefilling and seq.computed == len(seq.ids) - 1
        ]
        if not chunks and not decode_rows:
            return
        longest = max([chunk.end for chunk in chunks] + [len(self.running[row].ids) for row in decode_rows])
        if longest > self.cache.capacity:
            self._retract_from(self.cache.rows_after_growth(longest))
            self.cache.grow(longest)
            return  # rows may have gone: plan anew
        self._compute(chunks, decode_rows)

    def _compute(self, chunks: list[Chunk], decode_rows: list[int]) -> None:
        tokens: list[int] = []
        last: list[int] = []
        sampled: list[Sequence] = []
        scored: Sequence | None = None  # whose prompt logprobs are wanted; it is computed alone
        for chunk in chunks:
            seq = self.running[chunk.row]
            tokens += seq.ids[chunk.start : chunk.end]
            if chunk.end == len(seq.ids):
                last.append(len(tokens) - 1)
                sampled.append(seq)
            if _wants_score(seq):
                assert len(chunks) == 1
                assert not decode_rows
                scored, last = seq, list(range(len(tokens)))
        for row in decode_rows:
            seq = self.running[row]
            last.append(len(tokens))
            tokens.append(seq.ids[-1])
            sampled.append(seq)
        decode = [(row, len(self.running[row].ids) - 1) for row in decode_rows]
        logits = self.model.forward(tokens, self.cache, chunks, decode, last)
        for chunk in chunks:
            seq = self.running[chunk.row]
            seq.computed = chunk.end
            if seq.epoch == self.epoch:
                self.cache.computed(chunk.row, seq.array(chunk.end))
        for row in decode_rows:
            self.running[row].computed += 1
        if scored is not None:
            _score_prompt(scored, logits)
            logits = logits[-1:]
        self._sample(logits, sampled)

    def _sample(self, logits: torch.Tensor, sampled: list[Sequence]) -> None:
        if not sampled:
            return
        ids, logprobs = sample(
            logits, [s.params for s in sampled], [s.seed for s in sampled], [s.num_output for s in sampled]
        )
        context = self.model.architecture.context
        ended = []
        for seq, token, logprob in zip(sampled, ids, logprobs, strict=True):
            if seq.params.max_new_tokens == 0:
                seq.stop = Stop("length", 0)
            else:
                seq.append(token, logprob, self.version)
                seq.stop = find_stop(seq.ids, seq.num_output, seq.params, self._eos_ids, self._tokenizer, context)
            if seq.stop is not None:
                ended.append(seq)
            elif seq.stream and seq.num_output % seq.params.stream_interval == 1 % seq.params.stream_interval:
                seq.tell(self.version)
        for seq in ended:
            self._leave(seq)
            seq.tell(self.version)

    def _leave(self, seq: Sequence) -> None:
        """Take a running sequence out; its tokens stay behind as a prefix if they are of the present weights."""
        row = self.running.index(seq)
        fresh = seq.epoch == self.epoch
        if seq.routed_start >= 0:
            fed = max(seq.routed_start, len(seq.ids) - 1)  # the last id never went through the model
            seq.routed = self.cache.routed(row, seq.routed_start, seq.computed, fed)
        self.cache.finish(row, seq.array(seq.computed), len(self.running), retain=fresh)
        last = self.running.pop()
        if row < len(self.running):
            self.running[row] = last

    def _admit(self) -> None:
        """Start waiting sequences while rows are free and the budget of this step lasts."""
        budget = self._prefill_tokens - sum(len(seq.ids) - 1 - seq.computed for seq in self.running)
        admitted: list[bytes] = []
        postponed: list[Sequence] = []
        while self.waiting and budget > 0 and len(self.running) < self.cache.max_running:
            seq = self.waiting.popleft()
            ids = seq.array(len(seq.ids))
            source, shared = self.cache.match(ids) if seq.logprob_start < 0 else (-1, 0)
            more = shared + _WORTH_WAITING
            prefix = ids[:more].tobytes()
            if len(ids) >= more and any(other.startswith(prefix) for other in admitted):
                postponed.append(seq)
                continue
            row = len(self.running)
            self.cache.start(row, source, shared)
            self.running.append(seq)
            seq.computed, seq.epoch = shared, self.epoch
            if seq.num_output == 0:
                seq.cached = shared
            admitted.append(ids.tobytes())
            budget -= len(seq.ids) - shared
        self.waiting.extendleft(reversed(postponed))

    def _prefill_chunks(self) -> Iterator[Chunk]:
        budget = self._prefill_tokens
        alone = next((row for row, seq in enumerate(self.running) if _wants_score(seq)), None)
        for row, seq in enumerate(self.running):
            pending = len(seq.ids) - seq.computed
            if alone is not None:
                if row == alone:
                    yield Chunk(row=row, start=0, end=len(seq.ids))
                continue
            if pending <= 1 or budget <= 0:
                continue
            end = seq.computed + min(pending, budget)
            yield Chunk(row=row, start=seq.computed, end=end)
            budget -= end - seq.computed

    # Control, between steps

    def abort(self, chosen: Callable[[Sequence], bool], message: str) -> int:
        """End the chosen sequences now, with what they have; how many there were."""
        found = [seq for seq in (*self.running, *self.waiting) if chosen(seq)]
        for seq in found:
            if seq in self.running:
                self._leave(seq)
            else:
                self.waiting.remove(seq)
            seq.stop = Stop("abort", message)
            seq.tell(self.version)
        return len(found)

    def fail(self, message: str) -> None:
        """A step failed: end everything, without a touch of the cache."""
        ended = [*self.running, *self.waiting]
        self.running.clear()
        self.waiting.clear()
        for seq in ended:
            seq.stop = Stop("abort", message)
            seq.tell(self.version)

    def retract_all(self) -> None:
        """Send everything running back to wait, without keys and values."""
        self._retract_from(0)

    def _retract_from(self, row: int) -> None:
        retracted = self.running[row:]
        while len(self.running) > row:
            self.cache.finish(len(self.running) - 1, self.running[-1].array(0), len(self.running), retain=False)
            self.running.pop().retract()
        self.waiting.extendleft(reversed(retracted))

    def weights_changed(self, version: str) -> None:
        """New weights are in place: nothing of the old ones is shared any more."""
        self.version = version
        self.epoch += 1
        self.cache.flush()


def _wants_score(seq: Sequence) -> bool:
    return seq.logprob_start >= 0 and not seq.prompt_logprobs


def _score_prompt(seq: Sequence, logits: torch.Tensor) -> None:
    """Logprobs of the prompt's own tokens, at temperature 1; the first token has none."""
    logprobs = torch.log_softmax(logits, -1)
    targets = torch.tensor(seq.ids[1 : seq.prompt_len], dtype=torch.int64, device=logits.device)
    chosen = logprobs[: seq.prompt_len - 1].gather(1, targets.unsqueeze(1)).squeeze(1).tolist()
    seq.prompt_logprobs = [None, *chosen]
