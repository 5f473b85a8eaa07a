"""An agent in front of vLLM gets the answers that it would get without a recorder, field by field."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.engines.vllm.conftest import MODEL, Rollout
from tests.engines.vllm.test_calls import MESSAGES, PARAMETERS, TOOLS
from tests.recorder.answers import comparable, joined

CHAT, COMPLETION, GENERATE = "v1/chat/completions", "v1/completions", "inference/v1/generate"
SEEDED: dict[str, Any] = {"seed": 7}
USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
CHATS: list[dict[str, Any]] = [
    {"temperature": 0},
    {**SEEDED, "n": 2},
    {**SEEDED, "logprobs": True, "top_logprobs": 2},
    {**SEEDED, "logprobs": False},
    {**SEEDED, "stop": ["e", "a"]},
    {**SEEDED, "stop": ["e", "a"], "include_stop_str_in_output": True},
    {**SEEDED, "tools": TOOLS},
    {**SEEDED, "tools": TOOLS, "tool_choice": "required"},
    {**SEEDED, "return_token_ids": True},
    {**SEEDED, "response_format": {"type": "json_object"}},
    {**SEEDED, **USAGE},
    {"max_tokens": 100_000},
    {"temperature": -3},
    {"messages": []},
    {"model": "another"},
    {"tools": [{"type": "function"}]},
]
PROMPTS: list[dict[str, Any]] = [
    {"prompt": "Once upon", "temperature": 0},
    {"prompt": [70, 80, 90], **SEEDED, "n": 2},
    {"prompt": ["Once", "Twice upon"], **SEEDED},
    {"prompt": "Once", **SEEDED, "logprobs": 2},
    {"prompt": "Once", **SEEDED, "return_token_ids": True, "stop": ["e"]},
    {"prompt": "Once", **SEEDED, **USAGE},
    {"prompt": "Once", "max_tokens": 100_000},
    {"prompt": "Once", "logprobs": 1_000},
]
TOKENS: list[dict[str, Any]] = [
    {"token_ids": [70, 80, 90], "sampling_params": {**SEEDED, "max_tokens": 20}},
    {"token_ids": [70, 80, 90], "sampling_params": {**SEEDED, "max_tokens": 20, "n": 2, "logprobs": 1}},
    {"token_ids": [70, 80, 90], "sampling_params": {"temperature": -3}},
]
CALLS = [
    *[(CHAT, {"messages": MESSAGES, "max_tokens": 40, **more}) for more in CHATS],
    *[(COMPLETION, {"max_tokens": 20, **more}) for more in PROMPTS],
    *[(GENERATE, more) for more in TOKENS],
]


def answer(url: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Returns the status, and the whole answer; a streamed one as what its events say together."""
    said = httpx.post(f"{url}/{path}", json=body, timeout=60)
    content = comparable(said.content)
    return said.status_code, joined(content) if isinstance(content, list) else content


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_the_engines_own(rollout: Rollout, engine: str, stream: bool) -> None:
    statuses = []
    for path, call in CALLS:
        body = {"model": MODEL, "stream": stream, **call}
        recorded, direct = (answer(url, path, body) for url in (rollout.url, engine))
        assert recorded == direct, (path, body)
        statuses.append(recorded[0])
    print(f"{len(statuses)} answers, {statuses.count(200)} of them no errors: equal")
    assert 0 < statuses.count(200) < len(statuses)


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_is_the_engines_own(rollout: Rollout, engine: str, stream: bool) -> None:
    tools: Any = [{"name": "look", "description": "Look.", "input_schema": PARAMETERS}]
    for more in ({}, {"tools": tools}, {"stop_sequences": ["e", "w"]}, {"max_tokens": 2}, {"system": "Be brief."}):
        call: Any = {
            "model": MODEL,
            "max_tokens": 40,
            "extra_body": {"temperature": 0},
            "messages": MESSAGES[1:],
            **more,
        }
        said = [message(url, call, stream) for url in (rollout.url, engine)]
        assert said[0] == said[1], more


def message(url: str, call: Any, stream: bool) -> dict[str, Any]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        if not stream:
            said = client.messages.create(**call)
        else:
            with client.messages.stream(**call) as events:
                said = events.get_final_message()
    return said.model_dump(exclude_none=True, exclude={"id"})


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_says_what_the_engines_own_says(rollout: Rollout, engine: str, stream: bool) -> None:
    for more in ({}, {"max_output_tokens": 2}, {"instructions": "Be brief."}):
        call: Any = {"model": MODEL, "input": MESSAGES[1]["content"], "temperature": 0, "max_output_tokens": 40, **more}
        said = [response(f"{url}/v1", call, stream) for url in (rollout.url, engine)]
        assert said[0] == said[1], more


def response(url: str, call: Any, stream: bool) -> dict[str, Any]:
    """Returns what the API requires of a response, without what vLLM adds."""
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        if not stream:
            said: Any = client.responses.create(**call)
        else:
            with client.responses.stream(**call) as events:
                # The last event has the response, also if it is incomplete.
                ends: list[Any] = [*events]
                said = ends[-1].response
    settings = (said.model, said.temperature, said.top_p, said.instructions, said.max_output_tokens)
    counts = (said.usage.input_tokens, said.usage.output_tokens, said.usage.total_tokens)
    texts = [(item.type, item.status, item.content[0].text) for item in said.output]
    return {"texts": texts, "ends": (said.status, said.incomplete_details), "settings": settings, "counts": counts}
