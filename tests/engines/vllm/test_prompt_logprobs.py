"""A real vLLM gives the logprob of each token that it read, and a merged row has them for every token but the first."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.engines.vllm import tiny_model
from tests.engines.vllm.conftest import MODEL, Rollout
from tests.engines.vllm.test_calls import MESSAGES
from tests.engines.vllm.test_splicing import MORE, sent_back
from tests.recorder.test_prompt_logprobs import LOGPROBS, rows


@pytest.fixture
def flags() -> tuple[str, ...]:
    return ("--columns", "prompt_logprobs", "--splice", "on")


@pytest.fixture
def config() -> dict[str, Any]:
    return {"columns": [{**LOGPROBS, "required": False}]}


def test_they_are_those_of_a_forward_pass(rollout: Rollout) -> None:
    messages: list[Any] = [*MESSAGES]
    with openai.OpenAI(base_url=f"{rollout.url}/v1", api_key="none", max_retries=0) as client:
        for stream in (False, True, False):
            said: Any = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=40, stream=stream)
            messages = [*messages, sent_back(said, stream), MORE]
    rollout.recorder.finish(rollout.run)
    ((tokens, values),) = rows(rollout.service.grpc_address, rollout.run, "prompt_logprobs")
    last = rollout.witness.answers[-1]
    assert tokens == [*last.prompt, *last.response]
    expected = tiny_model.logprobs(rollout.model, tokens[:1], tokens[1:], 1.0)
    assert values[0] == LOGPROBS["fill"]
    difference = max(abs(one - other) for one, other in zip(values[1:], expected, strict=True))
    print(f"{len(tokens)} tokens: {difference:.1e}")
    assert difference <= 1e-4
