"""The KV cache: rows of equal capacity, the running sequences in rows 0..R-1, retained prefixes in the rows behind.

Because running rows are always the first ones, a decode step reads the cache as a view, without gathering. A finished sequence's row is
copied behind, to serve the next turn of its session or whoever shares its prompt; the least recently used goes first.
Of a mixture of experts it also holds which experts each token was given, so that tokens of a shared prefix have theirs too.
Invariant: a retained row holds exactly the keys and values of `tokens` under the current weights, or it is empty.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from rlagent.engine.architecture import Architecture
from rlagent.types import Int32Array

_MIN_CAPACITY: Final = 128  # tokens a row, at first; doubled when a sequence outgrows it
_MASK_MULTIPLE: Final = 16  # decode reads lengths rounded up to this, so that kernels see few shapes
# Decoded together on a CPU: each block reads as far as its longest row, so that a long one costs few others.
_CPU_BLOCK_ROWS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBlock:
    """Neighbouring decode rows, attended to together."""

    rows: slice  # of the cache
    queries: slice  # of the decode tokens
    length: int
    mask: torch.Tensor  # [rows, 1, 1, length] additive


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Where this forward's tokens go, and what its decode rows see."""

    rows: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    blocks: tuple[DecodeBlock, ...]


class KVCache:
    """Keys and values of all layers, [layers][rows, kv_heads, capacity, head_dim]."""

    def __init__(self, architecture: Architecture, *, max_running: int, max_total_tokens: int, dtype: torch.dtype,
                 device: torch.device) -> None:  # fmt: skip
        self._a = architecture
        self._dtype, self._device = dtype, device
        self._max_total_tokens = max_total_tokens
        self._max_running = max_running
        self.capacity = min(_MIN_CAPACITY, architecture.context)
        self.num_rows = 0
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._routed: torch.Tensor | None = None  # [rows, capacity, layers, top_k] int16; of a mixture of experts
        self._tokens = np.empty((0, 0), dtype=np.int32)
        self._lengths = np.empty(0, dtype=np.int64)
        self._used_at = np.empty(0, dtype=np.int64)
        self._clock = 0
        self._allocate(self.capacity)

    # Rows

    @property
    def max_running(self) -> int:
        """Rows that may run at once at the present capacity: at least one stays."""
        return max(1, min(self._max_running, self.num_rows))

    def rows_after_growth(self, length: int) -> int:
        """How many rows there will be once they hold `length` tokens; what runs beyond must be retracted before `grow`."""
        return self._rows_of(self._capacity_for(length))

    def grow(self, length: int) -> None:
        """Make rows that hold `length` tokens, of the same memory: fewer ones."""
        capacity = self._capacity_for(length)
        keys, values, routed = self._keys, self._values, self._routed
        old, tokens, lengths, used_at = self.capacity, self._tokens, self._lengths, self._used_at
        self._allocate(capacity)
        rows = min(self.num_rows, len(lengths))
        for layer in range(self._a.num_layers):
            self._keys[layer][:rows, :, :old] = keys[layer][:rows]
            self._values[layer][:rows, :, :old] = values[layer][:rows]
        if self._routed is not None and routed is not None:
            self._routed[:rows, :old] = routed[:rows]
        self._tokens[:rows, :old] = tokens[:rows]
        self._lengths[:rows], self._used_at[:rows] = lengths[:rows], used_at[:rows]

    def _capacity_for(self, length: int) -> int:
        capacity = self.capacity
        while capacity < length:
            capacity = min(2 * capacity, max(self._a.context, length))
        return capacity

    def _rows_of(self, capacity: int) -> int:
        # More rows than four times those that run are of little use as a prefix cache and cost a longer look-up.
        return min(max(1, self._max_total_tokens // capacity), 4 * self._max_running)

    def flush(self) -> None:
        """Forget all retained prefixes and release all memory of their tokens."""
        self._lengths[:] = 0

    def release(self) -> None:
        """Give the memory back (until `restore`). Nothing may be running."""
        self._keys, self._values = [], []
        self._lengths[:] = 0

    def restore(self) -> None:
        """Take the memory again after `release`."""
        if not self._keys:
            self._allocate(self.capacity)

    def match(self, prompt: Int32Array) -> tuple[int, int]:
        """The row that shares the longest prefix with `prompt`, and its length (0 when none does).

        At least one prompt token is left to compute, so that there are logits to sample from.
        """
        width = min(len(prompt) - 1, self.capacity)
        if width <= 0 or not self._lengths.any():
            return -1, 0
        differs = self._tokens[:, :width] != prompt[:width]
        shared = np.minimum(np.where(differs.any(1), differs.argmax(1), width), self._lengths)
        best = int(shared.argmax())
        if shared[best] == 0:
            return -1, 0
        self._touch(best)
        return best, int(shared[best])

    def start(self, row: int, source: int, length: int) -> None:
        """Begin a running sequence in `row` with the first `length` tokens of `source`; what `row` retained moves behind."""
        if self._lengths[row] and row != source:
            self._retain(row, int(self._lengths[row]), row + 1, spare=source)
        if row != source and length:
            self._copy(source, row, length)
        self._lengths[row] = 0

    def computed(self, row: int, tokens: Int32Array) -> None:
        """Running `row` holds these tokens now: others may share them."""
        self._tokens[row, : len(tokens)] = tokens
        self._lengths[row] = len(tokens)
        self._touch(row)

    def finish(self, row: int, tokens: Int32Array, num_running: int, *, retain: bool) -> None:
        """End the sequence in running `row`: retain its tokens behind, and move the last running row into its place."""
        if retain and len(tokens):
            self._tokens[row, : len(tokens)] = tokens
            self._retain(row, len(tokens), num_running)
        last = num_running - 1
        if row != last:
            self._copy(last, row, self.capacity)
            self._tokens[row], self._lengths[row], self._used_at[row] = (
                self._tokens[last], self._lengths[last], self._used_at[last],
            )  # fmt: skip
        self._lengths[last] = 0

    def _retain(self, row: int, length: int, first: int, spare: int = -1) -> None:
        """Copy `row` over the row behind that it extends, else over the least recently used, but never over `spare`."""
        if first >= self.num_rows:
            return
        tokens = self._tokens[row, :length]
        lengths = self._lengths[first:]
        extended = (
            first + int(i)
            for i in np.flatnonzero((lengths <= length) & (lengths > 0))
            if (self._tokens[first + i, : lengths[i]] == tokens[: lengths[i]]).all()
        )
        oldest = first + int(np.where(lengths == 0, -1, self._used_at[first:]).argmin())
        target = next(extended, oldest)
        if target == spare:
            return
        self._copy(row, target, length)
        self._tokens[target, :length] = tokens
        self._lengths[target] = length
        self._touch(target)

    def _touch(self, row: int) -> None:
        self._clock += 1
        self._used_at[row] = self._clock

    def _copy(self, source: int, target: int, length: int) -> None:
        for layer in range(self._a.num_layers):
            self._keys[layer][target, :, :length] = self._keys[layer][source, :, :length]
            self._values[layer][target, :, :length] = self._values[layer][source, :, :length]
        if self._routed is not None:
            self._routed[target, :length] = self._routed[source, :length]

    def _allocate(self, capacity: int) -> None:
        a = self._a
        self.capacity = capacity
        self.num_rows = self._rows_of(capacity)
        shape = (self.num_rows, a.num_kv_heads, capacity, a.head_dim)
        self._keys = [torch.zeros(shape, dtype=self._dtype, device=self._device) for _ in range(a.num_layers)]
        self._values = [torch.zeros(shape, dtype=self._dtype, device=self._device) for _ in range(a.num_layers)]
        if a.experts is not None:
            routed = (self.num_rows, capacity, a.num_layers, a.experts.top_k)
            self._routed = torch.zeros(routed, dtype=torch.int16, device=self._device)
        self._tokens = np.zeros((self.num_rows, capacity), dtype=np.int32)
        self._lengths = np.zeros(self.num_rows, dtype=np.int64)
        self._used_at = np.zeros(self.num_rows, dtype=np.int64)

    # Forward

    def plan(
        self, rows: torch.Tensor, positions: torch.Tensor, decode_rows: Sequence[int], seen: Sequence[int]
    ) -> StepPlan:
        """Lay out one forward of tokens at `positions` [T] of `rows` [T].

        The last len(decode_rows) of them decode, in ascending rows; each sees `seen` tokens of its row, its own included.
        """
        if not decode_rows:
            return StepPlan(rows=rows, positions=positions, blocks=())
        longest = torch.arange(min(self.capacity, _rounded(max(seen))), device=self._device)
        hidden = longest >= positions[-len(decode_rows) :].unsqueeze(1) + 1
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        mask = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        most = _CPU_BLOCK_ROWS if self._device.type == "cpu" else len(decode_rows)
        blocks = []
        for start, end in _runs(decode_rows, most):
            length = min(self.capacity, _rounded(max(seen[start:end])))
            where = slice(decode_rows[start], decode_rows[start] + end - start)
            part = mask[start:end, :, :, :length]
            blocks.append(DecodeBlock(rows=where, queries=slice(start, end), length=length, mask=part))
        return StepPlan(rows=rows, positions=positions, blocks=tuple(blocks))

    def write(self, layer: int, step: StepPlan, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store keys and values [T, kv_heads, head_dim] of this step's tokens."""
        self._keys[layer][step.rows, :, step.positions] = key
        self._values[layer][step.rows, :, step.positions] = value

    def write_routed(self, layer: int, step: StepPlan, chosen: torch.Tensor) -> None:
        """Store which experts this step's tokens were given in a layer, [T, top_k]."""
        assert self._routed is not None
        self._routed[step.rows, step.positions, layer] = chosen.to(torch.int16)

    def routed(self, row: int, start: int, computed: int, end: int) -> Int32Array | None:
        """The experts [end - start, layers, top_k] of a row's tokens [start, end), -1 from `computed` on, 0 in dense layers; None
        where the model has none.
        """
        if self._routed is None:
            return None
        found = np.full((end - start, *self._routed.shape[2:]), -1, dtype=np.int32)
        stop = max(start, min(computed, end))
        found[: stop - start] = self._routed[row, start:stop].cpu().numpy()
        return found

    def row_view(self, layer: int, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [1, kv_heads, length, head_dim] of one row."""
        return self._keys[layer][row : row + 1, :, :length], self._values[layer][row : row + 1, :, :length]

    def block_view(self, layer: int, block: DecodeBlock) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [rows, kv_heads, length, head_dim] of a block of decode rows."""
        return self._keys[layer][block.rows, :, : block.length], self._values[layer][block.rows, :, : block.length]


def _runs(rows: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Spans [start, end) of ascending rows that follow one another, of at most so many."""
    start = 0
    for index in range(1, len(rows) + 1):
        if index == len(rows) or rows[index] != rows[index - 1] + 1 or index - start == most:
            yield start, index
            start = index


def _rounded(length: int) -> int:
    return -(-length // _MASK_MULTIPLE) * _MASK_MULTIPLE
