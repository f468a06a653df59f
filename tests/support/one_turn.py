"""A rollout of one short answer, whose reward is unlike every other rollout's: every group has a best and a worst."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import openai

from rlagent.client import SessionHandle


async def rollout(task: Mapping[str, object], session: SessionHandle) -> float:
    """Ask one question; a number in [0, 1) made of the session's name."""
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        question = f"What is the pickup code of {task['customer']}'s parcel?"
        await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": question}], max_tokens=24
        )
    return int(hashlib.sha256(session.base_url.encode()).hexdigest()[:8], 16) / 16**8
