"""Compares what an agent gets through the recorder with what it would get without."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import httpx
from anthropic.types import Message

from tests.engines.templates.engine import calls_of
from tests.engines.templates.model import Answer
from tests.recorder.answers import comparable, joined

_LOGPROB = re.compile(rb'(?<="logprob":)[^,}]+')
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@dataclass
class Comparison:
    """Answers with the recorder and without. engine: its URL. has_model: whether it has a real model. Then logprobs,
    which depend on the prompt, are not compared, and streams by what their events say together.

    answers: how many were compared. refused: calls that the template refuses, and were answered because they were
    spliced. different: answers that differ, one text for each.
    """

    engine: str
    has_model: bool = False
    answers: int = 0
    refused: int = 0
    different: list[str] = field(default_factory=list)

    async def completion(self, response: httpx.Response) -> None:
        """Sends the call of a chat completion to the engine, too, and compares its answer. A hook of httpx."""
        body = response.request.content
        # Otherwise it loads certificates for each call.
        async with httpx.AsyncClient(verify=False, timeout=60) as client:
            direct = await client.post(f"{self.engine}/v1/chat/completions", content=body)
        if (response.status_code, direct.status_code) == (200, 400):
            self.refused += 1
            return
        got = response.status_code, self._said(await response.aread())
        self._compare(got, (direct.status_code, self._said(direct.content)))

    def _said(self, body: bytes) -> Any:
        if not self.has_model:
            return comparable(body)
        said = comparable(_LOGPROB.sub(b"0", body))
        return joined(said) if isinstance(said, list) else said

    def message(self, said: Message, answer: Answer) -> None:
        """Compares a message with what the model says, because no engine returns token ids for messages. The parsers of
        a real engine may make something else of it."""
        if self.has_model:
            return
        # Signatures are random, and the library's blocks have more fields, which are null.
        content = [block.model_dump(exclude_none=True, exclude={"signature"}) for block in said.content]
        more = {"stop_reason": said.stop_reason, "stop_sequence": said.stop_sequence}
        self._compare({"content": content, **more, "output_tokens": said.usage.output_tokens}, _message(answer))

    def _compare(self, got: Any, expected: Any) -> None:
        self.answers += 1
        if got != expected:
            self.different.append(f"{json.dumps(got)} instead of {json.dumps(expected)}")


def _message(answer: Answer) -> dict[str, Any]:
    """Returns the answer as Anthropic's messages have it."""
    content: list[dict[str, Any]] = [{"type": "thinking", "thinking": answer.thoughts}] if answer.thoughts else []
    content += [{"type": "text", "text": answer.text}] if answer.text else []
    for call in calls_of(answer):
        function = call["function"]
        arguments = json.loads(function["arguments"])
        content.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
    # As in vLLM, whole calls count more than a stop string behind them.
    finish = "tool_calls" if answer.calls and answer.finish == "stop" else answer.finish
    words = answer.stop if isinstance(answer.stop, str) and finish == "stop" else None
    more = {"stop_reason": "stop_sequence" if words else _STOPS[finish], "stop_sequence": words}
    return {"content": content, **more, "output_tokens": len(answer.tokens)}
