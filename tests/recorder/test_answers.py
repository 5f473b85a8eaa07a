"""An agent gets the answers that it would get without a recorder, field by field."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.on_loop import Service
from tests.recorder.answers import comparable
from tests.recorder.engine import Engine
from tests.recorder.recorders import StartRecorder

WORDS = ("say hello", "think hm; done", 'call look {"at": "clock"}', "short cut", "fail 400", "fail 503")
CHATS: list[dict[str, Any]] = [{"messages": [{"role": "user", "content": words}]} for words in WORDS]
PROMPTS: list[dict[str, Any]] = [{"prompt": "say a"}, {"prompt": ["say a", "short b"], "n": 2}]
REQUESTED: tuple[dict[str, Any], ...] = (
    {},
    {"n": 2, "seed": 7},
    {"stream": True},
    {"stream": True, "stream_options": {"include_usage": True}, "n": 2},
)
CALLS = [
    ("v1/chat/completions", {**chat, **more, "logprobs": logprobs})
    for chat in CHATS
    for more in REQUESTED
    for logprobs in (False, True)
] + [
    ("v1/completions", {**prompt, **more, **logprobs})
    for prompt in PROMPTS
    for more in REQUESTED
    for logprobs in ({}, {"logprobs": 1})
]


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_an_answer_is_the_engines_own(
    engine: Engine, sglang: Engine, service: Service, start_recorder: StartRecorder, run: str, name: str
) -> None:
    upstream = {"vllm": engine, "sglang": sglang}[name].url
    recorder = start_recorder(upstream, service.grpc_address, "--engine", name)
    with httpx.Client() as client:
        for path, call in CALLS:
            answers = [
                client.post(f"{url}/{path}", json={"model": "toy", **call}) for url in (recorder.base(run), upstream)
            ]
            recorded, direct = [(answer.status_code, comparable(answer.content)) for answer in answers]
            assert recorded == direct, (path, call)
