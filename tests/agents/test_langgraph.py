"""langgraph with langchain's models, by chat completions and by Responses: a graph whose agent calls another graph."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from tests.agents.conftest import Rollout
from tests.agents.model import Branch, call, together
from tests.recorder.engine import Words


@tool
def look(room: str) -> str:
    """Look around in a room."""
    return f"The {room} has 2 clocks."


def graph_of(model: ChatOpenAI, words: str, *tools: Any) -> Any:
    """Returns an agent: a model that calls tools until it has an answer."""
    bound = model.bind_tools(tools)

    def speak(state: MessagesState) -> dict[str, Any]:
        return {"messages": [bound.invoke([("system", words), *state["messages"]])]}

    graph = StateGraph(MessagesState)
    graph.add_node("speak", speak)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "speak")
    graph.add_conditional_edges("speak", tools_condition, {"tools": "tools", END: END})
    graph.add_edge("tools", "speak")
    return graph.compile()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("language", ["chat", "responses"])
def test_a_graph_and_its_subgraph_are_a_row_each(rollout: Rollout, language: str, stream: bool) -> None:
    rollout.script(
        Branch(
            "leader",
            "You lead.",
            (
                together(call("look", "Look first.", "\n\nI look.", room="attic"), call("look", room="barn")),
                call("count", "Not mine.", room="cellar"),
                Words("Two and two.", "Four."),
                call("look", room="hall"),
                Words("Two.", "Two."),
            ),
        ),
        Branch("counter", "You count.", (call("look", "Count.", room="cellar"), Words("One, two.", "Two."))),
    )
    model = ChatOpenAI(
        model="toy",
        base_url=f"{rollout.url}/v1",
        api_key="none",
        max_retries=0,
        streaming=stream,
        use_responses_api=language == "responses",
    )
    counter = graph_of(model, "You count.", look)

    @tool
    def count(room: str) -> str:
        """Count clocks."""
        return counter.invoke({"messages": [("user", f"Count in the {room}.")]})["messages"][-1].text

    leader = graph_of(model, "You lead.", look, count)
    said = leader.invoke({"messages": [("user", "Where are the clocks?")]})["messages"]
    assert said[-1].text == "Four."
    said = leader.invoke({"messages": [*said, ("user", "And in the hall?")]})["messages"]
    assert said[-1].text == "Two."
    rollout.check()
