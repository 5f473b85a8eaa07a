"""Compares conversations by what was said: clients send an answer back in another form than they received it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from hashlib import blake2b
from itertools import accumulate
from typing import Any

import orjson

Document = dict[str, Any]
Message = Mapping[str, Any]

SETTINGS = ("model", "tools", "chat_template", "chat_template_kwargs", "reasoning_effort", "documents")
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning")
LIMITS = ("length", "abort", "repetition", "error")
_DIGEST_BYTES = 16
# As in vLLM's and SGLang's ids of calls; those of Kimi's parser are `functions.NAME:0`, with the number of the call.
_RANDOM_ID = re.compile("[0-9a-f]{16}")


class Conversation:
    """The messages of a call, with a key for each of their beginnings. Beginnings with the same key say the same, under
    the same tools and template settings.

    messages: as the call has them. settings: a digest of the tools and the template settings.
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        """Raises AttributeError, KeyError, TypeError or ValueError if the engine would refuse the call."""
        self.messages: list[Document] = list(request["messages"])
        values = [request.get(name) or None for name in SETTINGS]
        is_without_tools = request.get("tool_choice") == "none"
        self.settings = _digest(b"", [*values, is_without_tools, request.get("add_special_tokens") is True])
        self._digests = list(accumulate(map(said, self.messages), _digest, initial=b""))

    @property
    def answered(self) -> int:
        """The number of messages up to the last answer of the model; 0 if there is none."""
        roles = [message.get("role") for message in self.messages]
        return len(roles) - roles[::-1].index("assistant") if "assistant" in roles else 0

    def key(self, count: int) -> bytes:
        """Returns the key of the first `count` messages."""
        return self._digests[count] + self.settings

    def key_after(self, answer: Message) -> bytes:
        """Returns the key of all messages and an answer to them."""
        return _digest(self._digests[-1], said(answer)) + self.settings

    def has_other_settings(self, count: int, key: bytes) -> bool:
        """Returns whether the key belongs to the first `count` messages under other settings."""
        return key.startswith(self._digests[count]) and not key.endswith(self.settings)


def said(message: Message) -> Any:
    """Returns what a message says, in a form that does not depend on the client.

    The content is one text, empty or missing alike, and an answer's without spaces at its ends; the arguments of calls
    are values; thoughts are left out, because many agents do not send them back.
    """
    calls = [_called(call) for call in message.get("tool_calls") or ()]
    role, content = message.get("role"), _words(message.get("content"))
    if role == "assistant" and isinstance(content, str):
        content = content.strip()
    return role, content, calls, message.get("tool_call_id"), message.get("name")


def _called(call: Mapping[str, Any]) -> Any:
    """Returns what a call says. With a random id its arguments do not count: agents rewrite them (Claude Code adds
    defaults, and removes spaces at the ends of lines)."""
    identity, function = call.get("id"), call["function"]
    if _RANDOM_ID.search(identity or ""):
        return identity, function["name"]
    return identity, function["name"], _arguments(function.get("arguments"))


def is_cut(choice: Mapping[str, Any], request: Mapping[str, Any]) -> bool:
    """Returns whether the answer has no end of turn, because the call or the engine ended it: by a stop string, by a
    stop token of the call, or at a limit."""
    # SGLang calls it `matched_stop`.
    stop = choice.get("stop_reason", choice.get("matched_stop"))
    is_stop_of_call = isinstance(stop, str) or stop in (request.get("stop_token_ids") or ())
    return choice.get("finish_reason") in LIMITS or is_stop_of_call


def _words(content: Any) -> Any:
    """Returns the text of a content; its parts if some are not text."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part for part in content if part.get("type") not in _THOUGHTS]
    return "".join(part["text"] for part in parts) if all("text" in part for part in parts) else parts


def _arguments(text: Any) -> Any:
    """Rewrites the arguments of a call: clients write spaces, escapes and numbers in their own way."""
    try:
        return _ENCODE(_DECODE(text or "{}"))
    except (RecursionError, TypeError, ValueError):
        return text


def _number(text: str) -> float:
    """Returns a whole number as int: JavaScript writes 1.0 as 1."""
    value = float(text)
    return int(value) if value.is_integer() else value


_DECODE = json.JSONDecoder(parse_float=_number).decode
_ENCODE = json.JSONEncoder(sort_keys=True).encode


def _digest(before: bytes, value: Any) -> bytes:
    text = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    return blake2b(before + text, digest_size=_DIGEST_BYTES).digest()
