"""An agent in front of vLLM gets the answers that it would get without a recorder, field by field."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.comparing import answer, message, response
from tests.engines.rollout import MESSAGES, MODEL, PARAMETERS, TOOLS, Rollout

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


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_says_what_the_engines_own_says(rollout: Rollout, engine: str, stream: bool) -> None:
    for more in ({}, {"max_output_tokens": 2}, {"instructions": "Be brief."}):
        call: Any = {"model": MODEL, "input": MESSAGES[1]["content"], "temperature": 0, "max_output_tokens": 40, **more}
        said = [response(f"{url}/v1", call, stream) for url in (rollout.url, engine)]
        assert said[0] == said[1], more
