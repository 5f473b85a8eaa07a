"""Collects the choices of a streamed completion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gristmill_recorder.languages.language import Document

_ENDS = ("finish_reason", "stop_reason", "matched_stop")


class ChoiceReader:
    """Collects the choices of a streamed chat completion in the form of one that is not streamed."""

    def __init__(self) -> None:
        self._choices: dict[int, Document] = {}
        self._texts: dict[int, list[str]] = {}
        self._thoughts: dict[int, list[str]] = {}
        self._calls: dict[tuple[int, int], Document] = {}

    def read(self, chunk: Mapping[str, Any]) -> None:
        for part in chunk.get("choices") or ():
            index, delta = part.get("index", 0), part.get("delta") or {}
            choice = self._choices.setdefault(index, {"index": index})
            choice |= {name: part[name] for name in _ENDS if part.get(name) is not None}
            self._texts.setdefault(index, []).append(delta.get("content") or part.get("text") or "")
            self._thoughts.setdefault(index, []).append(delta.get("reasoning") or delta.get("reasoning_content") or "")
            for call in delta.get("tool_calls") or ():
                self._read_call(index, call)

    def _read_call(self, index: int, part: Mapping[str, Any]) -> None:
        function = part.get("function") or {}
        call = self._calls.setdefault((index, part["index"]), {"id": None, "name": None, "arguments": []})
        call["id"], call["name"] = part.get("id") or call["id"], function.get("name") or call["name"]
        call["arguments"].append(function.get("arguments") or "")

    def choices(self) -> list[Document]:
        return [{**choice, "message": self._message(index)} for index, choice in sorted(self._choices.items())]

    def _message(self, index: int) -> Document:
        calls = [
            {"id": call["id"], "function": {"name": call["name"], "arguments": "".join(call["arguments"])}}
            for (owner, _), call in sorted(self._calls.items())
            if owner == index
        ]
        message: Document = {"role": "assistant", "content": "".join(self._texts[index])}
        thoughts = "".join(self._thoughts[index])
        return message | ({"tool_calls": calls} if calls else {}) | ({"reasoning": thoughts} if thoughts else {})
