"""Answers in a form in which those with and without a recorder are equal."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import openai

from tests.recorder.answers import comparable, joined


def answer(url: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Returns the status, and the whole answer; a streamed one as what its events say together."""
    said = httpx.post(f"{url}/{path}", json=body, timeout=60)
    content = comparable(said.content)
    if isinstance(content, list) and "meta_info" in content[0]:
        # Of SGLang's own route every event has all that was said so far.
        content = content[-2:]
    return said.status_code, joined(content) if isinstance(content, list) else content


def message(url: str, call: Any, stream: bool) -> dict[str, Any]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        if not stream:
            said = client.messages.create(**call)
        else:
            with client.messages.stream(**call) as events:
                said = events.get_final_message()
    return said.model_dump(exclude_none=True, exclude={"id"})


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
