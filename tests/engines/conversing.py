"""Conversations of several calls, each of which continues the one before it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import openai

from tests.engines.rollout import MESSAGES, MODEL, Rollout
from tests.engines.witness import Answer

MORE = {"role": "user", "content": "And now?"}
CALLS = 4


def converse(rollout: Rollout, *streams: bool, **more: Any) -> None:
    """Makes a call for each of `streams`: whether it is streamed."""
    messages: list[Any] = [*MESSAGES]
    with openai.OpenAI(base_url=f"{rollout.url}/v1", api_key="none", max_retries=0) as client:
        for stream in streams:
            said: Any = client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=40, stream=stream, **more
            )
            messages = [*messages, _sent_back(said, stream), MORE]


def check_spliced(rollout: Rollout) -> None:
    """Asserts that every later call was spliced: its prompt begins with the whole call before it."""
    answers = rollout.witness.answers
    assert len(answers) == CALLS
    assert all(_extends(later, earlier) for earlier, later in pairwise(answers))
    assert rollout.recorder.metric('splices_total{result="spliced"}') == CALLS - 1
    rollout.check(CALLS)


def _extends(later: Answer, earlier: Answer) -> bool:
    whole = [*earlier.prompt, *earlier.response]
    return later.prompt[: len(whole)] == whole


def _sent_back(said: Any, stream: bool) -> dict[str, Any]:
    """Returns the answer as many agents send it back: its words alone."""
    if stream:
        words = "".join(choice.delta.content or "" for chunk in said for choice in chunk.choices)
    else:
        words = said.choices[0].message.content or ""
    return {"role": "assistant", "content": words}
