"""LangGraph with langchain-openai: a graph of two nodes, the model and its tools, over chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.messages import SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from parcel_tools import INSTRUCTIONS, parcel

MAX_STEPS = 12  # of the graph: the model and its tools by turns


async def rollout(task: Mapping[str, object], session: Any) -> float:
    """One parcel, until the model answers without a call."""
    question, functions, reward = parcel(task)
    tools = [tool(function) for function in functions]
    llm = ChatOpenAI(model="policy", base_url=session.base_url, api_key=session.api_key).bind_tools(tools)

    async def ask(state: MessagesState) -> dict[str, list[Any]]:
        return {"messages": [await llm.ainvoke([SystemMessage(INSTRUCTIONS), *state["messages"]])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", ask)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    ended = await graph.compile().ainvoke({"messages": [("user", question)]}, {"recursion_limit": MAX_STEPS})
    return reward(ended["messages"][-1].text)
