"""Anthropic's `/v1/messages` as a chat completion: engines give no token ids for messages, and make chat completions of
them themselves. What becomes of what is as in vLLM's `entrypoints/anthropic/serving.py`, so that prompts are the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from gristmill_recorder.forms.forms import Asking, ChatForm, Document, refuse_media
from gristmill_recorder.forms.message_answers import MessageStream, message_of
from gristmill_recorder.refusals import WrongCall

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "chat_template_kwargs")
# Claude Code's has a number that changes with each request, so that no prompt would begin with the one before.
_BILLING = "x-anthropic-billing-header"
_JSON = "output_config"


class MessagesForm(ChatForm):
    """One call. Raises WrongCall for what has no counterpart in a chat completion."""

    def __init__(self, document: Document, asking: Asking) -> None:
        try:
            chat = _chat_of(document)
        except (AttributeError, KeyError, TypeError) as error:
            raise WrongCall(f"the call is not as Anthropic's API has it: {type(error).__name__}: {error}") from None
        super().__init__("chat/completions", chat, asking)
        self.api = "messages"

    def whole(self, answer: Document) -> Document:
        return message_of(answer)

    def stream(self) -> MessageStream:
        return MessageStream(self)


def _chat_of(document: Document) -> Document:
    refuse_media(document.get("messages"))
    chat: Document = {name: document[name] for name in _SAME if document.get(name) is not None}
    chat["messages"] = [*_system(document), *_messages(document.get("messages") or ())]
    if stop := document.get("stop_sequences"):
        chat["stop"] = stop
    if document.get("stream"):
        chat |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    if document.get(_JSON):
        chat |= _output(document[_JSON])
    if tools := document.get("tools"):
        chat["tools"] = [_tool(tool) for tool in tools]
        chat["tool_choice"] = "auto"
    if choice := document.get("tool_choice"):
        chat["tool_choice"] = _tool_choice(choice)
        if choice.get("disable_parallel_tool_use"):
            chat["parallel_tool_calls"] = False
    return chat


def _system(document: Document) -> Iterator[Document]:
    """One message of all that is said as the system."""
    given = [document.get("system") or (), *(m["content"] for m in document.get("messages") or () if _is_system(m))]
    parts = [part for content in given for part in _texts(content) if not part.startswith(_BILLING)]
    if parts:
        yield {"role": "system", "content": "".join(parts)}


def _is_system(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "system"


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if part.get("type") == "text" and part.get("text")]


def _messages(messages: Any) -> Iterator[Document]:
    for message in messages:
        if _is_system(message):
            continue
        role, content = message.get("role"), message.get("content")
        if isinstance(content, str):
            yield {"role": role, "content": content}
        elif role == "assistant":
            yield _assistant(content or ())
        else:
            yield from _user(content or ())


def _assistant(blocks: Any) -> Document:
    message: Document = {"role": "assistant"}
    if texts := _texts(blocks):
        message["content"] = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
    thoughts = [block["thinking"] for block in blocks if block.get("type") == "thinking" and block.get("thinking")]
    if thoughts:
        # Also where vLLM calls it `reasoning`, it knows this name.
        message["reasoning_content"] = "".join(thoughts)
    calls = [_call(block) for block in blocks if block.get("type") == "tool_use"]
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Mapping[str, Any]) -> Document:
    arguments = json.dumps(block.get("input") or {})
    return {"id": block.get("id"), "type": "function", "function": {"name": block.get("name"), "arguments": arguments}}


def _user(blocks: Any) -> Iterator[Document]:
    """What tools said comes first, each as a message of its own."""
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_result":
            refuse_media([block])
            said = "\n".join(_texts(block.get("content") or ""))
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": said}
        elif kind != "text":
            raise WrongCall(f"a message has a part of type {kind}, which no chat completion has; leave it out")
    if texts := _texts(blocks):
        yield {
            "role": "user",
            "content": texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts],
        }


def _tool(tool: Mapping[str, Any]) -> Document:
    if "input_schema" not in tool:
        raise WrongCall(
            f"tool {tool.get('name')!r} is one of Anthropic's own, which the engine does not have; give an input_schema"
        )
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, Any]) -> Any:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind not in _CHOICES:
        raise WrongCall(f"tool_choice has the type {kind!r}; known are tool, {', '.join(_CHOICES)}")
    return _CHOICES[kind]


def _output(config: Mapping[str, Any]) -> Document:
    chat: Document = {}
    if schema := (config.get("format") or {}).get("schema"):
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "json_schema", "schema": schema}}
    if effort := config.get("effort"):
        chat["reasoning_effort"] = effort
    return chat
