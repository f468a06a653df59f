"""Hugging Face's smolagents: a ToolCallingAgent over chat completions. It is synchronous: a plain `def`, in a worker of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parcel_tools import INSTRUCTIONS, parcel
from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

MAX_STEPS = 6


def rollout(task: Mapping[str, object], session: Any) -> float:
    """One parcel. The agent ends by calling its own tool `final_answer`."""
    question, tools, reward = parcel(task)
    # By itself it forces a call in every turn, which a policy can only follow under a grammar, and such turns are not trained on.
    model = OpenAIModel("policy", api_base=session.base_url, api_key=session.api_key, tool_choice="auto")
    agent = ToolCallingAgent(
        tools=[tool(function) for function in tools],
        model=model,
        instructions=INSTRUCTIONS,
        max_steps=MAX_STEPS,
        verbosity_level=LogLevel.OFF,
    )
    return reward(agent.run(question))
