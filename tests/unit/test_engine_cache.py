"""The KV cache's rows: whatever is started, grown, finished and flushed, a row holds what it says."""

from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlagent.engine.architecture import Architecture
from rlagent.engine.cache import KVCache

CONTEXT = 512


def make_cache(max_running: int, max_total_tokens: int) -> KVCache:
    architecture = Architecture(
        family="Qwen3ForCausalLM", num_layers=2, hidden=4, num_heads=1, num_kv_heads=1, head_dim=2, intermediate=4, vocab_size=9,
        norm_eps=1e-6, tied=True, qkv_bias=False, qk_norm=False, context=CONTEXT, rope={}, eos_ids=(),
    )  # fmt: skip
    return KVCache(
        architecture,
        max_running=max_running,
        max_total_tokens=max_total_tokens,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def content(tokens: np.ndarray, start: int) -> np.ndarray:
    """What a forward would write for tokens[start:]: like keys and values, it depends on all tokens before."""
    hashed = np.cumsum(tokens.astype(np.int64) * (np.arange(len(tokens)) % 7 + 1))
    return hashed[start:].astype(np.float32)


def compute(cache: KVCache, row: int, tokens: np.ndarray, start: int) -> None:
    """Write the keys and values of tokens[start:], and publish them."""
    positions = torch.arange(start, len(tokens))
    plan = cache.plan(torch.full_like(positions, row), positions, [], [])
    fresh = torch.from_numpy(content(tokens, start)).view(-1, 1, 1).expand(-1, 1, 2)
    for layer in range(2):
        cache.write(layer, plan, fresh + layer, -fresh - layer)
    cache.computed(row, tokens)


def held(cache: KVCache, row: int, length: int) -> np.ndarray:
    """A row's content; all layers, keys and values must agree."""
    keys, _ = cache.row_view(0, row, length)
    found: np.ndarray = keys[0, 0, :, 0].numpy()
    for layer in range(2):
        keys, values = cache.row_view(layer, row, length)
        assert (keys[0, 0, :, 0].numpy() == found + layer).all()
        assert (values == -keys).all()
    return found


def start(cache: KVCache, running: list[np.ndarray], prompt: np.ndarray) -> int:
    """As the scheduler does; how many tokens were shared."""
    source, shared = cache.match(prompt)
    row = len(running)
    cache.start(row, source, shared)
    assert (held(cache, row, shared) == content(prompt, 0)[:shared]).all()
    compute(cache, row, prompt, shared)
    running.append(prompt)
    return shared


def finish(cache: KVCache, running: list[np.ndarray], row: int, *, retain: bool = True) -> None:
    cache.finish(row, running[row], len(running), retain=retain)
    last = running.pop()
    if row < len(running):
        running[row] = last


class Rows(RuleBasedStateMachine):
    """Prompts over two letters, so that prefixes are shared often."""

    prompts = st.lists(st.sampled_from([1, 2]), min_size=2, max_size=60).map(lambda p: np.array(p, dtype=np.int32))

    @initialize(max_running=st.integers(1, 4), rows=st.integers(1, 9))
    def begin(self, max_running: int, rows: int) -> None:
        self.cache = make_cache(max_running, rows * 128)
        self.running: list[np.ndarray] = []

    @precondition(lambda self: len(self.running) < self.cache.max_running)
    @rule(prompt=prompts)
    def start(self, prompt: np.ndarray) -> None:
        start(self.cache, self.running, prompt)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), retain=st.booleans())
    def finish(self, data: Any, retain: bool) -> None:
        finish(self.cache, self.running, data.draw(st.integers(0, len(self.running) - 1)), retain=retain)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=prompts)
    def extend(self, data: Any, more: np.ndarray) -> None:
        """A running sequence gets longer, beyond the capacity sometimes; rows may have to go."""
        row = data.draw(st.integers(0, len(self.running) - 1))
        longer = np.concatenate((self.running[row], more, more))[:CONTEXT]
        if len(longer) > self.cache.capacity:
            kept = self.cache.rows_after_growth(len(longer))
            while len(self.running) > kept:
                finish(self.cache, self.running, len(self.running) - 1, retain=False)
            self.cache.grow(len(longer))
            assert self.cache.num_rows == kept
        if row < len(self.running):
            compute(self.cache, row, longer, len(self.running[row]))
            self.running[row] = longer

    @rule()
    def flush(self) -> None:
        self.cache.flush()
        assert self.cache.match(np.array([1, 2, 1, 2], dtype=np.int32)) == (-1, 0)

    @invariant()
    def running_rows_are_whole(self) -> None:
        for row, tokens in enumerate(self.running):
            assert (held(self.cache, row, len(tokens)) == content(tokens, 0)).all()

    @invariant()
    def rows_hold_what_they_say(self) -> None:
        for row in range(self.cache.num_rows):
            length = int(self.cache._lengths[row])
            assert (held(self.cache, row, length) == content(self.cache._tokens[row, :length], 0)).all()


TestRows = Rows.TestCase
TestRows.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def test_the_longest_prefix_is_found_and_one_token_is_left_to_compute() -> None:
    cache, running = make_cache(1, 4 * 128), []  # type: ignore[var-annotated]
    for prompt in (ids(1, 2, 3), ids(1, 2, 3, 4, 5), ids(2, 2)):
        start(cache, running, prompt)
        finish(cache, running, 0)
    assert cache.match(ids(1, 2, 3, 4, 9))[1] == 4
    assert cache.match(ids(1, 2, 3, 4, 5))[1] == 4
    assert cache.match(ids(1, 2, 3, 4, 5, 6))[1] == 5
    assert cache.match(ids(3, 2, 1)) == (-1, 0)
    assert cache.match(ids(1)) == (-1, 0)


def test_the_least_recently_used_goes_first_and_an_extended_prefix_before_it() -> None:
    cache, running = make_cache(1, 4 * 128), []  # type: ignore[var-annotated]  # one row runs, three retain

    def turn(*tokens: int) -> int:
        shared = start(cache, running, ids(*tokens))
        finish(cache, running, 0)
        return shared

    for first in (1, 2, 3):
        turn(first, 5, 5)
    assert turn(1, 5, 5, 6) == 3  # overwrites its own prefix: 2 and 3 stay
    assert cache.match(ids(2, 5, 5, 5))[1] == 3
    assert cache.match(ids(3, 5, 5, 5))[1] == 3
    turn(4, 5, 5)  # the oldest by use is 1: a look at 2 and 3 was a use
    assert cache.match(ids(1, 5, 5, 6, 6))[1] == 0
    assert cache.match(ids(2, 5, 5, 5))[1] == 3


def test_a_row_that_is_shared_from_is_not_overwritten_by_what_must_make_room() -> None:
    cache, running = make_cache(2, 3 * 128), []  # type: ignore[var-annotated]
    start(cache, running, ids(1, 1, 1))
    start(cache, running, ids(2, 2, 2))
    finish(cache, running, 1)  # retained in the last row, the only one behind
    finish(cache, running, 0)  # retained in the middle row, where the next but one begins
    start(cache, running, ids(3, 3))
    assert start(cache, running, ids(2, 2, 2, 4)) == 3
    assert (held(cache, 1, 4) == content(ids(2, 2, 2, 4), 0)).all()


def test_memory_released_is_taken_again_empty() -> None:
    cache, running = make_cache(2, 4 * 128), []  # type: ignore[var-annotated]
    start(cache, running, ids(1, 2, 3))
    finish(cache, running, 0)
    cache.release()
    assert cache.match(ids(1, 2, 3, 4)) == (-1, 0)
    cache.restore()
    assert start(cache, running, ids(1, 2, 3, 4)) == 0
