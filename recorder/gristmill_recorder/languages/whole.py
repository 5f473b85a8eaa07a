"""Streams a chat completion that the engine answered whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from gristmill._engines.events import DONE, Event
from gristmill_recorder.languages.language import Document, Stream

_OF_ALL = ("id", "created", "model")
_NOT_OF_CHUNKS = frozenset(("choices", "object", "usage"))


def streamed(stream: Stream, answer: Mapping[str, Any], options: Mapping[str, Any]) -> bytes:
    """Returns the events that the stream makes of the answer, with one chunk per choice. options: the `stream_options`
    of the call."""
    datas = [*map(orjson.dumps, _chunks(answer, options)), DONE]
    return b"".join(stream.read(Event(b"data: " + data + b"\n\n", data)) for data in datas)


def _chunks(answer: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[Document]:
    of_all = {name: answer[name] for name in _OF_ALL if name in answer} | {"object": "chat.completion.chunk"}
    more = {name: value for name, value in answer.items() if name not in _NOT_OF_CHUNKS}
    if options.get("continuous_usage_stats"):
        more["usage"] = answer.get("usage")
    for choice in answer["choices"]:
        of_choice = {name: value for name, value in choice.items() if name != "message"}
        yield {**of_all, **more, "choices": [{**of_choice, "delta": _delta(choice["message"])}]}
        more = {}
    if options.get("include_usage"):
        yield {**of_all, "choices": [], "usage": answer.get("usage")}


def _delta(message: Mapping[str, Any]) -> Document:
    calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls") or ())]
    return {name: value for name, value in {**message, "tool_calls": calls}.items() if value}
