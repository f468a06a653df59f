"""The ids of texts that were tokenised lately: rollouts of one task begin with the same prompt.

In the flow: tokenizer.py asks for the ids of a call's text here. Invariant: they are those of the whole text, and nobody can
write into them; what is kept is bounded by the characters of its texts.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import numpy as np

from rlagent.types import Int32Array

# A text of so many characters takes milliseconds, and a thread to do it in a tenth of one.
LONG_CHARS: Final = 16_384
# A shorter text is of one turn: it does not come again.
_MIN_CHARS: Final = 1024
# Of all texts that are kept; their ids take about as many bytes.
_MAX_CHARS: Final = 4 * 1024 * 1024


class RecentTexts:
    """Each text is tokenised once while it is remembered, also for those who ask at the same time."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode
        self._known: OrderedDict[str, asyncio.Future[Int32Array]] = OrderedDict()
        self._num_chars = 0

    async def ids(self, text: str) -> Int32Array:
        """Those of a text; a long one is tokenised in a thread."""
        if len(text) < _MIN_CHARS:
            return self._ids(text)
        found = self._known.get(text)
        if found is None:
            found = self._begin(text)
        else:
            self._known.move_to_end(text)
        return found.result() if found.done() else await asyncio.shield(found)

    def _begin(self, text: str) -> asyncio.Future[Int32Array]:
        """Tokenise a text, now or in a thread, and remember it: the oldest are forgotten for it."""
        loop = asyncio.get_running_loop()
        if len(text) < LONG_CHARS:
            found = loop.create_future()
            found.set_result(self._ids(text))
        else:
            found = loop.run_in_executor(None, self._ids, text)
        self._known[text] = found
        self._num_chars += len(text)
        while self._num_chars > _MAX_CHARS:
            self._num_chars -= len(self._known.popitem(last=False)[0])
        return found

    def _ids(self, text: str) -> Int32Array:
        ids = np.array(self._encode(text), np.int32)
        ids.setflags(write=False)
        return ids
