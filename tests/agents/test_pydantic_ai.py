"""pydantic-ai, by each language that it speaks: an agent delegates to another in a tool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pydantic_ai
import pytest
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.google import GoogleModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.google import GoogleProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.agents.conftest import Rollout
from tests.agents.model import Branch, call, together
from tests.recorder.engine import Words

LANGUAGES: dict[str, Callable[[str], Any]] = {
    "chat": lambda url: OpenAIChatModel("toy", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none")),
    "responses": lambda url: OpenAIResponsesModel("toy", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none")),
    "messages": lambda url: AnthropicModel("toy", provider=AnthropicProvider(base_url=url, api_key="none")),
    "gemini": lambda url: GoogleModel("toy", provider=GoogleProvider(base_url=url, api_key="none")),
}


def look(room: str) -> str:
    """Look around in a room."""
    return f"The {room} has 2 clocks."


async def ask(agent: Any, text: str, stream: bool, **more: Any) -> Any:
    if not stream:
        return await agent.run(text, **more)
    async with agent.iter(text, **more) as run:
        async for node in run:
            if pydantic_ai.Agent.is_model_request_node(node):
                async with node.stream(run.ctx) as events:
                    async for _ in events:
                        pass
        return run.result


async def play(model: Any, stream: bool) -> None:
    counter = pydantic_ai.Agent(model, instructions="You count.", tools=[look])

    async def count(room: str) -> str:
        """Count clocks."""
        return (await ask(counter, f"Count in the {room}.", stream)).output

    leader = pydantic_ai.Agent(model, system_prompt="You lead.", tools=[look, count])
    async with leader:
        said = await ask(leader, "Where are the clocks?", stream)
        assert said.output == "Four."
        said = await ask(leader, "And in the hall?", stream, message_history=said.all_messages())
        assert said.output == "Two."


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("language", LANGUAGES)
def test_an_agent_and_the_one_that_it_delegates_to_are_a_row_each(
    rollout: Rollout, language: str, stream: bool
) -> None:
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
    asyncio.run(play(LANGUAGES[language](rollout.url), stream))
    rollout.check()
