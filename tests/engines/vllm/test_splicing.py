"""A real vLLM reads the recorded tokens and what is new: every prompt begins with the whole call before it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import anthropic
import openai
import pytest

from tests.engines.vllm.conftest import MODEL, Rollout
from tests.engines.vllm.test_calls import MESSAGES, TOOLS
from tests.engines.vllm.witness import Answer

MORE = {"role": "user", "content": "And now?"}
CALLS = 4


@pytest.fixture(params=["on"])
def flags(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return ("--splice", request.param)


def extends(later: Answer, earlier: Answer) -> bool:
    whole = [*earlier.prompt, *earlier.response]
    return later.prompt[: len(whole)] == whole


def check(rollout: Rollout) -> None:
    answers = rollout.witness.answers
    assert len(answers) == CALLS
    assert all(extends(later, earlier) for earlier, later in pairwise(answers))
    assert rollout.recorder.metric('splices_total{result="spliced"}') == CALLS - 1
    rollout.check(CALLS)


def sent_back(said: Any, stream: bool) -> dict[str, Any]:
    """The answer as many agents send it back: its words alone."""
    if stream:
        words = "".join(choice.delta.content or "" for chunk in said for choice in chunk.choices)
    else:
        words = said.choices[0].message.content or ""
    return {"role": "assistant", "content": words}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{}, {"tools": TOOLS}, {"stop": ["e", "a"]}], ids=["plain", "tools", "stop"])
def test_a_conversation_is_one_row(rollout: Rollout, more: dict[str, Any], stream: bool) -> None:
    messages: list[Any] = [*MESSAGES]
    with openai.OpenAI(base_url=f"{rollout.url}/v1", api_key="none", max_retries=0) as client:
        for _ in range(CALLS):
            said: Any = client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=40, stream=stream, **more
            )
            messages = [*messages, sent_back(said, stream), MORE]
    check(rollout)


def test_anthropics_messages_are_one_row(rollout: Rollout) -> None:
    messages: list[Any] = [MESSAGES[1]]
    with anthropic.Anthropic(base_url=rollout.url, api_key="none", max_retries=0) as client:
        for _ in range(CALLS):
            said = client.messages.create(model=MODEL, max_tokens=40, system="Be brief.", messages=messages)
            content = [block.to_dict() for block in said.content]
            messages = [*messages, {"role": "assistant", "content": content}, MORE]
    check(rollout)
