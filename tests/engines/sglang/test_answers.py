"""An agent in front of SGLang gets the answers that it would get without a recorder, field by field."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.comparing import answer
from tests.engines.rollout import MESSAGES, MODEL, TOOLS, Rollout

CHAT, COMPLETION, GENERATE = "v1/chat/completions", "v1/completions", "generate"
GREEDY: dict[str, Any] = {"temperature": 0}
USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
CHATS: list[dict[str, Any]] = [
    {},
    {"n": 2},
    {"logprobs": True, "top_logprobs": 2},
    {"logprobs": False},
    {"stop": ["e", "a"]},
    {"stop": ["e", "a"], "no_stop_trim": True},
    {"tools": TOOLS},
    {"return_output_ids_in_sglext": True},
    USAGE,
    {"max_tokens": 100_000},
    {"temperature": -3},
    {"messages": []},
    {"tools": [{"type": "function"}]},
]
PROMPTS: list[dict[str, Any]] = [
    {"prompt": "Once upon"},
    {"prompt": [70, 80, 90], "n": 2},
    {"prompt": ["Once", "Twice upon"]},
    {"prompt": "Once", "logprobs": 2},
    {"prompt": "Once", "return_token_ids": True, "stop": ["e"]},
    {"prompt": "Once", **USAGE},
    {"prompt": "Once", "max_tokens": 100_000},
]
TOKENS: list[dict[str, Any]] = [
    {"input_ids": [70, 80, 90], "sampling_params": {**GREEDY, "max_new_tokens": 20}},
    {"input_ids": [70, 80, 90], "sampling_params": {**GREEDY, "max_new_tokens": 20}, "return_logprob": True},
    {"input_ids": [70, 80, 90], "sampling_params": {"temperature": -3}},
]
CALLS = [
    *[(CHAT, {"model": MODEL, "messages": MESSAGES, "max_tokens": 40, **GREEDY, **more}) for more in CHATS],
    *[(COMPLETION, {"model": MODEL, "max_tokens": 20, **GREEDY, **more}) for more in PROMPTS],
    *[(GENERATE, more) for more in TOKENS],
]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_the_engines_own(rollout: Rollout, engine: str, stream: bool) -> None:
    statuses = []
    for path, call in CALLS:
        body = {"stream": stream, **call}
        recorded, direct = (answer(url, path, body) for url in (rollout.url, engine))
        assert recorded == direct, (path, body)
        statuses.append(recorded[0])
    print(f"{len(statuses)} answers, {statuses.count(200)} of them no errors: equal")
    assert 0 < statuses.count(200) < len(statuses)
