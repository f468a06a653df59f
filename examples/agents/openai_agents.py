"""OpenAI's Agents SDK (package openai-agents), over Responses, its default, or over chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agents import (
    Agent,
    Model,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI
from parcel_tools import INSTRUCTIONS, parcel

MAX_TURNS = 6


async def rollout(task: Mapping[str, object], session: Any) -> float:
    """The agent as its documentation starts it: the Responses API, strict tools."""
    async with _client(session) as client:
        return await _play(task, OpenAIResponsesModel(model="policy", openai_client=client))


async def rollout_chat(task: Mapping[str, object], session: Any) -> float:
    """The same agent over chat completions."""
    async with _client(session) as client:
        return await _play(task, OpenAIChatCompletionsModel(model="policy", openai_client=client))


def _client(session: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)


async def _play(task: Mapping[str, object], model: Model) -> float:
    question, tools, reward = parcel(task)
    agent = Agent(
        name="parcels", instructions=INSTRUCTIONS, model=model, tools=[function_tool(function) for function in tools]
    )
    # Its tracing would be sent to the vendor.
    result = await Runner.run(agent, question, max_turns=MAX_TURNS, run_config=RunConfig(tracing_disabled=True))
    return reward(result.final_output)
