"""Pydantic AI, over chat completions or over Anthropic's messages: the same agent, two dialects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from parcel_tools import INSTRUCTIONS, parcel
from pydantic_ai import Agent, UsageLimits
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

MAX_REQUESTS = 6


async def rollout(task: Mapping[str, object], session: Any) -> float:
    """Over chat completions."""
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        return await _play(task, OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client)))


async def rollout_anthropic(task: Mapping[str, object], session: Any) -> float:
    """Over Anthropic's messages. Their SDK puts /v1 behind its base_url by itself."""
    base_url = session.environ()["ANTHROPIC_BASE_URL"]
    async with AsyncAnthropic(base_url=base_url, api_key=session.api_key) as client:
        return await _play(task, AnthropicModel("policy", provider=AnthropicProvider(anthropic_client=client)))


async def _play(task: Mapping[str, object], model: Model) -> float:
    question, tools, reward = parcel(task)
    agent = Agent(model, instructions=INSTRUCTIONS, tools=list(tools))
    result = await agent.run(question, usage_limits=UsageLimits(request_limit=MAX_REQUESTS))
    return reward(result.output)
