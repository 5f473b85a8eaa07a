"""Rows of SGLang's answers have its own token ids and logprobs, which are those of a forward pass at temperature 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.engines.rollout import MESSAGES, MODEL, PARAMETERS, TOOLS, Rollout


@pytest.fixture
def client(rollout: Rollout) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{rollout.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("more", "answers"),
    [
        pytest.param({}, 1, id="plain"),
        pytest.param({"n": 3}, 3, id="three choices"),
        pytest.param({"tools": TOOLS}, 1, id="tools"),
        pytest.param({"stop": ["e", "a"]}, 1, id="stop"),
        pytest.param({"logprobs": True, "top_logprobs": 2}, 1, id="logprobs that the agent asked for"),
        # One in 261 tokens ends an answer.
        pytest.param({"n": 6, "max_tokens": 200}, 6, id="answers of which most end by themselves"),
    ],
)
def test_chat_completions(
    rollout: Rollout, client: openai.OpenAI, more: dict[str, Any], answers: int, stream: bool
) -> None:
    asked = {"max_tokens": 40, "messages": MESSAGES, "stream": stream, **more}
    said: Any = client.chat.completions.create(model=MODEL, **asked)
    # An answer may be the one token that ends it.
    assert len(list(said)) >= answers if stream else len(said.choices) == answers
    rollout.check(answers)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "answers"),
    [
        pytest.param("Once upon a time", 1, id="text"),
        pytest.param([70, 80, 90], 1, id="token ids"),
        pytest.param(["Once", "Twice upon"], 2, id="two prompts"),
    ],
)
def test_completions(rollout: Rollout, client: openai.OpenAI, prompt: Any, answers: int, stream: bool) -> None:
    said: Any = client.completions.create(model=MODEL, prompt=prompt, max_tokens=40, stream=stream)
    # An answer may be the one token that ends it.
    assert len(list(said)) >= answers if stream else len(said.choices) == answers
    rollout.check(answers)


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_messages(rollout: Rollout, stream: bool) -> None:
    tools: Any = [{"name": "look", "description": "Look.", "input_schema": PARAMETERS}]
    asked: Any = {"model": MODEL, "max_tokens": 40, "messages": MESSAGES[1:], "tools": tools}
    with anthropic.Anthropic(base_url=rollout.url, api_key="none", max_retries=0) as client:
        if stream:
            with client.messages.stream(**asked) as events:
                events.get_final_message()
        else:
            client.messages.create(**asked)
    rollout.check(1)


@pytest.mark.parametrize("stream", [False, True])
def test_responses(rollout: Rollout, client: openai.OpenAI, stream: bool) -> None:
    said: Any = client.responses.create(model=MODEL, input="Where?", max_output_tokens=40, stream=stream)
    assert not stream or [*said][-1].type in ("response.completed", "response.incomplete")
    rollout.check(1)


@pytest.mark.parametrize("stream", [False, True])
def test_sglangs_own_route(rollout: Rollout, stream: bool) -> None:
    body = {"input_ids": [70, 80, 90], "sampling_params": {"max_new_tokens": 40}, "stream": stream}
    answer = httpx.post(f"{rollout.url}/generate", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    rollout.check(1)
