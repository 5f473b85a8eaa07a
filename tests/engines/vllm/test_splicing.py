"""A real vLLM reads the recorded tokens and what is new: every prompt begins with the whole call before it."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from tests.engines.conversing import CALLS, MORE, check_spliced, converse
from tests.engines.rollout import MESSAGES, MODEL, TOOLS, Rollout


@pytest.fixture
def flags() -> tuple[str, ...]:
    return ("--splice", "on")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{}, {"tools": TOOLS}, {"stop": ["e", "a"]}], ids=["plain", "tools", "stop"])
def test_a_conversation_is_one_row(rollout: Rollout, more: dict[str, Any], stream: bool) -> None:
    converse(rollout, *[stream] * CALLS, **more)
    check_spliced(rollout)


def test_anthropics_messages_are_one_row(rollout: Rollout) -> None:
    messages: list[Any] = [MESSAGES[1]]
    with anthropic.Anthropic(base_url=rollout.url, api_key="none", max_retries=0) as client:
        for _ in range(CALLS):
            said = client.messages.create(model=MODEL, max_tokens=40, system="Be brief.", messages=messages)
            content = [block.to_dict() for block in said.content]
            messages = [*messages, {"role": "assistant", "content": content}, MORE]
    check_spliced(rollout)
