"""A response of vLLM's own `/v1/responses`, whole and as the events of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def response(text: str, prompt: list[int], sampled: list[int], *, has_messages: bool) -> dict[str, Any]:
    """has_messages: whether it has the tokens."""
    content: list[dict[str, Any]] = [{"type": "output_text", "text": text, "annotations": [], "logprobs": None}]
    message = {"id": "msg-1", "type": "message", "role": "assistant", "status": "completed", "content": content}
    answer: dict[str, Any] = {
        "id": "resp-1",
        "object": "response",
        "created_at": 1,
        "model": "toy",
        "output": [message],
    }
    answer |= {"status": "completed", "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    if has_messages:
        raw = {"type": "raw_message_tokens"}
        answer["input_messages"] = [{**raw, "message": "", "tokens": prompt}]
        answer["output_messages"] = [{**raw, "message": "", "tokens": sampled}]
    return answer


def events(text: str, answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {
        "type": "response.created",
        "sequence_number": 0,
        "response": {**answer, "status": "in_progress", "output": []},
    }
    place = {"item_id": "msg-1", "output_index": 0, "content_index": 0}
    for number, letter in enumerate(text, 1):
        yield {
            "type": "response.output_text.delta",
            "sequence_number": number,
            "delta": letter,
            "logprobs": [],
            **place,
        }
    yield {"type": "response.completed", "sequence_number": len(text) + 1, "response": answer}
