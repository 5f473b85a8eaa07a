"""Agents of two frameworks, which know nothing of the recorder, become rows with the engine's own tokens."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import agents
import openai
import pydantic_ai
import pytest
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.engines.rollout import MODEL, Rollout, has_grammar

Room = Literal["attic", "cellar"]
QUESTIONS = ("Where is the clock?", "What time is it?")


def look(room: Room) -> str:
    """Look around in a room."""
    return f"The {room} is empty."


def check(rollout: Rollout) -> None:
    """Checks the rows of an agent that called a tool, which a grammar forced it to, and then answered freely."""
    asked = rollout.witness.answers
    assert any(message["role"] == "tool" for answer in asked for message in answer.request["messages"])
    assert {has_grammar(answer) for answer in asked} == {False, True}
    rollout.check(2)


@pytest.mark.parametrize("stream", [False, True])
def test_openai_agents(rollout: Rollout, stream: bool) -> None:
    async def play() -> None:
        async with openai.AsyncOpenAI(base_url=f"{rollout.url}/v1", api_key="none", max_retries=0) as client:
            model = agents.OpenAIChatCompletionsModel(MODEL, client)
            forced = agents.ModelSettings(max_tokens=200, tool_choice="required", parallel_tool_calls=False)
            looking = agents.Agent("a", model=model, tools=[agents.function_tool(look)], model_settings=forced)
            said = await run(looking, QUESTIONS[0])
            talking = agents.Agent("a", model=model, model_settings=agents.ModelSettings(max_tokens=40))
            await run(talking, [*said.to_input_list(), {"role": "user", "content": QUESTIONS[1]}])

    async def run(agent: Any, text: Any) -> Any:
        if not stream:
            return await agents.Runner.run(agent, text)
        result = agents.Runner.run_streamed(agent, text)
        async for _ in result.stream_events():
            pass
        return result

    agents.set_tracing_disabled(True)
    asyncio.run(play())
    check(rollout)


@pytest.mark.parametrize("stream", [False, True])
def test_pydantic_ai(rollout: Rollout, stream: bool) -> None:
    async def play() -> None:
        async with openai.AsyncOpenAI(base_url=f"{rollout.url}/v1", api_key="none", max_retries=0) as client:
            model = OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=client))
            choosing = pydantic_ai.Agent(model, output_type=pydantic_ai.ToolOutput(Room, strict=True), retries=5)
            said = await run(choosing, QUESTIONS[0], model_settings={"max_tokens": 200, "parallel_tool_calls": False})
            talking = pydantic_ai.Agent(model, model_settings={"max_tokens": 40})
            await run(talking, QUESTIONS[1], message_history=said.all_messages())

    async def run(agent: Any, text: str, **more: Any) -> Any:
        if not stream:
            return await agent.run(text, **more)
        async with agent.run_stream(text, **more) as result:
            await result.get_output()
            return result

    asyncio.run(play())
    check(rollout)
