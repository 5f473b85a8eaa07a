"""Answers of an engine with a recorder and without one, as what an agent can compare."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

_OF_THE_CALL = frozenset(
    (
        *("id", "request_id", "created", "e2e_latency", "response_sent_to_client_ts"),
        *("prompt_tokens", "total_tokens", "cached_tokens", "cached_tokens_details"),
    )
)
_TEXTS = frozenset(("content", "reasoning", "reasoning_content", "arguments", "text"))


def comparable(body: bytes) -> Any:
    """Returns an answer, or the list of a stream's events, without ids, times and counts of prompt tokens."""
    if not body.startswith(b"data: "):
        return _without(json.loads(body))
    events = [event.removeprefix(b"data: ") for event in body.split(b"\n\n") if event]
    return [_without(json.loads(event)) if event.startswith(b"{") else event.decode() for event in events]


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without(each) for name, each in value.items() if name not in _OF_THE_CALL}
    return [_without(each) for each in value] if isinstance(value, list) else value


def joined(events: Iterable[Any]) -> Any:
    """Returns the events of a stream as one, because an engine may send the same tokens in more events or fewer: texts
    are continued, choices and calls by their index, and of other values the last one counts."""
    whole: Any = None
    for event in events:
        whole = _joined("", whole, event if isinstance(event, dict) else {event: True})
    return whole


def _joined(name: str, whole: Any, part: Any) -> Any:
    if whole is None or part is None:
        return part if whole is None else whole
    if isinstance(part, dict):
        return whole | {key: _joined(key, whole.get(key), value) for key, value in part.items()}
    if isinstance(part, list) and all(isinstance(each, dict) and "index" in each for each in part):
        known = {each["index"]: each for each in whole}
        known |= {each["index"]: _joined("", known.get(each["index"]), each) for each in part}
        return [known[index] for index in sorted(known)]
    return whole + part if isinstance(part, list) or name in _TEXTS else part
