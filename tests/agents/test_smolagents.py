"""smolagents, by chat completions: an agent that manages another."""

from __future__ import annotations

from typing import Any

import pytest
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

from tests.agents.conftest import Rollout
from tests.agents.model import Branch, call
from tests.recorder.engine import Words


@tool
def look(room: str) -> str:
    """Look around in a room.

    Args:
        room: The room.
    """
    return f"The {room} has 2 clocks."


def play(rollout: Rollout, kind: type[Any], stream: bool, **more: Any) -> None:
    model = OpenAIModel("toy", api_base=f"{rollout.url}/v1", api_key="none", **more)
    quiet: dict[str, Any] = {"verbosity_level": 0, "stream_outputs": stream}
    counter = kind([look], model, name="counter", description="Counts.", instructions="You count.", **quiet)
    leader = kind([look], model, managed_agents=[counter], instructions="You lead.", **quiet)
    assert leader.run("Where are the clocks?") == "Four."


def code(reasoning: str, line: str) -> Words:
    """What a model says that is stopped after a block of code."""
    return Words(reasoning, f"\n\nI go on.\n<code>\n{line}\n</code>", is_cut=True)


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_that_writes_code_and_the_one_that_it_manages_are_a_row_each(rollout: Rollout, stream: bool) -> None:
    leader = (
        code("Look first.", 'print(look("attic"))'),
        code("Not mine.", 'print(counter("Count in the cellar."))'),
        code("Two and two.", 'final_answer("Four.")'),
    )
    counter = (code("Count.", 'print(look("cellar"))'), code("One, two.", 'final_answer("Two.")'))
    rollout.script(Branch("leader", "You lead.", leader), Branch("counter", "You count.", counter))
    # Without these the agent adds to its answers in the history: `Calling tools:`, and the end of the block of code.
    users = {"tool-call": "user", "tool-response": "user"}
    whole = {"include_stop_str_in_output": True}
    play(rollout, CodeAgent, stream, custom_role_conversions=users, extra_body=whole)
    rollout.check()


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_that_rewrites_its_calls_as_text_has_a_row_of_each_answer(rollout: Rollout, stream: bool) -> None:
    leader = (
        call("look", "Look first.", "\n\nI look.", room="attic"),
        call("counter", "Not mine.", task="Count in the cellar.", additional_args={}),
        call("final_answer", "Two and two.", answer="Four."),
    )
    counter = (call("look", "Count.", room="cellar"), call("final_answer", answer="Two."))
    rollout.script(
        *(Branch(f"leader {number}", "You lead.", [answer]) for number, answer in enumerate(leader)),
        *(Branch(f"counter {number}", "You count.", [answer]) for number, answer in enumerate(counter)),
    )
    play(rollout, ToolCallingAgent, stream)
    rollout.check()
