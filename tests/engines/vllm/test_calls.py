"""Rows of vLLM's answers have its own token ids and logprobs, which are those of a forward pass at temperature 1."""

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


@pytest.fixture
def claude(rollout: Rollout) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=rollout.url, api_key="none", max_retries=0) as client:
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
    ],
)
def test_chat_completions(
    rollout: Rollout, client: openai.OpenAI, more: dict[str, Any], answers: int, stream: bool
) -> None:
    said: Any = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=40, stream=stream, **more)
    # An answer may be the one token that ends it.
    assert len(list(said)) >= answers if stream else len(said.choices) == answers
    rollout.check(answers)
    assert rollout.recorder.metric("unreproducible_steps_total") == 0


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
def test_anthropics_messages(rollout: Rollout, claude: anthropic.Anthropic, stream: bool) -> None:
    tools: Any = [{"name": "look", "description": "Look.", "input_schema": PARAMETERS}]
    messages: Any = MESSAGES[1:]
    for _ in range(2):
        asked: Any = {"model": MODEL, "max_tokens": 40, "system": "Be brief.", "messages": messages, "tools": tools}
        if stream:
            with claude.messages.stream(**asked) as events:
                said = events.get_final_message()
        else:
            said = claude.messages.create(**asked)
        content = [block.to_dict() for block in said.content]
        messages = [*messages, {"role": "assistant", "content": content}, {"role": "user", "content": "And now?"}]
    rollout.check(2)


@pytest.mark.parametrize("stream", [False, True])
def test_vllms_own_route(rollout: Rollout, stream: bool) -> None:
    body = {"model": MODEL, "token_ids": [70, 80, 90], "sampling_params": {"max_tokens": 40, "n": 2}, "stream": stream}
    answer = httpx.post(f"{rollout.url}/inference/v1/generate", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert 'prompt_token_ids":' not in answer.text.replace('"prompt_token_ids":null', "")
    rollout.check(2)


def test_a_conversation(rollout: Rollout, client: openai.OpenAI) -> None:
    messages = [*MESSAGES]
    for _ in range(3):
        said: Any = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=20).choices[0].message
        messages += [said.to_dict(), {"role": "user", "content": "And now?"}]
    rollout.check(3)


def test_another_temperature_is_that_of_a_trainer_that_divides_by_it(rollout: Rollout, client: openai.OpenAI) -> None:
    client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=40, temperature=0.7)
    rollout.check(1, temperature=0.7)
    assert rollout.recorder.metric('unreproducible_steps_total{setting="temperature"}') == 1


@pytest.mark.parametrize(
    ("more", "setting"),
    [
        ({"top_p": 0.9}, "top_p"),
        ({"extra_body": {"top_k": 5}}, "top_k"),
        ({"extra_body": {"repetition_penalty": 1.3}}, "repetition_penalty"),
        ({"logit_bias": {"70": 5}}, "logit_bias"),
        ({"tools": TOOLS, "tool_choice": "required"}, "grammar"),
    ],
)
def test_what_a_trainer_cannot_reproduce_is_counted_and_differs(
    rollout: Rollout, client: openai.OpenAI, more: dict[str, Any], setting: str
) -> None:
    client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=40, **more)
    assert rollout.largest_difference() > 0.01
    assert rollout.recorder.metric(f'unreproducible_steps_total{{setting="{setting}"}}') == 1
