"""openai-agents, by chat completions and by Responses: an agent uses another as a tool, and hands over to a third."""

from __future__ import annotations

import asyncio
from typing import Any

import agents
import openai
import pytest

from tests.agents.conftest import Rollout
from tests.agents.model import Branch, call, together
from tests.recorder.engine import Words

LANGUAGES = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}


@agents.function_tool
def look(room: str) -> str:
    """Look around in a room."""
    return f"The {room} has 2 clocks."


async def ask(agent: Any, text: Any, stream: bool) -> Any:
    if not stream:
        return await agents.Runner.run(agent, text)
    result = agents.Runner.run_streamed(agent, text)
    async for _ in result.stream_events():
        pass
    return result


async def play(url: str, language: str, stream: bool) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        model = LANGUAGES[language]("toy", client)
        counter = agents.Agent("counter", instructions="You count.", model=model, tools=[look])
        writer = agents.Agent("writer", instructions="You write.", model=model, tools=[look])
        tools = [look, counter.as_tool("count", "Count clocks.")]
        leader = agents.Agent("leader", instructions="You lead.", model=model, tools=tools, handoffs=[writer])
        said = await ask(leader, "Where are the clocks?", stream)
        assert said.final_output == "Four."
        said = await ask(leader, [*said.to_input_list(), {"role": "user", "content": "Write it down."}], stream)
        assert said.final_output == "Four clocks."


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("language", LANGUAGES)
def test_agents_as_tools_and_handoffs_are_rows_of_their_own(rollout: Rollout, language: str, stream: bool) -> None:
    rollout.script(
        Branch(
            "leader",
            "You lead.",
            (
                together(call("look", "Look first.", "\n\nI look.", room="attic"), call("look", room="barn")),
                call("count", "Not mine.", input="Count in the cellar."),
                Words("Two and two.", "Four."),
                call("transfer_to_writer", "The writer's."),
            ),
        ),
        Branch("counter", "You count.", (call("look", room="cellar"), Words("One, two.", "Two."))),
        Branch("writer", "You write.", (call("look", "Again.", room="attic"), Words("Write.", "Four clocks."))),
    )
    agents.set_tracing_disabled(True)
    asyncio.run(play(rollout.url, language, stream))
    rollout.check()
