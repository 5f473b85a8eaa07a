"""Translates Anthropic's `/v1/messages` into chat completions, and the answers back.

Engines translate messages into chat completions too, but return no token ids for them. This module translates like
vLLM's `entrypoints/anthropic/serving.py`, so that prompts are the same (https://docs.anthropic.com/en/api/messages).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import orjson

from gristmill._engines.refusals import refuse, refuse_media
from gristmill_recorder.languages.chat import ChatForm
from gristmill_recorder.languages.images import data_url, image_part, results
from gristmill_recorder.languages.integers import written
from gristmill_recorder.languages.language import Asking, Document
from gristmill_recorder.languages.translation import Block, Completion, TranslatedStream, in_one_system, translating
from gristmill_recorder.refusals import NoThread, WrongCall

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "chat_template_kwargs", "cache_salt", "vllm_xargs")
# Claude Code sends a line that begins so, with a number that changes with each request. It is removed, because
# with it no prompt would extend the previous one.
_BILLING = "x-anthropic-billing-header"
_OF_SERVICE = ("compaction", "container", "mcp_servers")
# The types of blocks that each message, and the result of a tool, may contain.
_OF_SYSTEM = ("text",)
_OF_USER = ("text", "image", "tool_result")
_OF_RESULT = ("text", "image", "tool_reference")
# A redacted thought is encrypted by Anthropic, so that no engine can read it: it is left out, as in vLLM.
_OF_ASSISTANT = ("text", "thinking", "redacted_thinking", "tool_use")
_OF_TOOL = ("strict", "defer_loading")
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


class MessagesForm(ChatForm):
    """A call of `/v1/messages`. Raises WrongCall for fields without a counterpart in a chat completion."""

    def __init__(self, document: Document, asking: Asking) -> None:
        with translating("Anthropic"):
            chat = _chat_of(document)
        super().__init__("chat/completions", chat, asking)
        self.api = "messages"

    def whole(self, answer: Document) -> Document:
        completion = Completion.of(answer)
        content = [_content(block) for block in completion.blocks]
        return {**_message(completion), "content": content, **_stop(completion), "usage": _usage(completion)}

    def stream(self) -> TranslatedStream:
        return TranslatedStream(self, MessageWriter())


def _chat_of(document: Document) -> Document:
    if document.get("thread"):
        raise NoThread("thread is set, but the recorder stores no conversations; omit thread, and send all messages")
    for name in _OF_SERVICE:
        refuse(document, name, "only Anthropic's own service provides it")
    chat: Document = {name: document[name] for name in _SAME if document.get(name) is not None}
    messages = [*_system(document.get("system") or ()), *_messages(document.get("messages") or ())]
    chat["messages"] = [*in_one_system(messages, "")]
    if stop := document.get("stop_sequences"):
        chat["stop"] = stop
    if document.get("stream"):
        options = {"include_usage": True, "continuous_usage_stats": True}
        chat |= {"stream": document["stream"], "stream_options": options}
    chat |= _output({"format": document.get("output_format"), **(document.get("output_config") or {})})
    chat |= _thinking(document.get("thinking") or {"type": "adaptive"})
    if tools := document.get("tools"):
        chat["tools"] = [_tool(tool) for tool in tools]
        chat["tool_choice"] = "auto"
    if choice := document.get("tool_choice"):
        chat["tool_choice"] = _tool_choice(choice)
        if choice.get("disable_parallel_tool_use"):
            chat["parallel_tool_calls"] = False
    return chat


def _blocks(content: Any, kinds: Collection[str]) -> list[Document]:
    """Returns the blocks of a content. Raises WrongCall for a block of another type than these."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
    refuse_media([{"content": blocks}], kinds)
    for block in blocks:
        if (kind := block.get("type")) not in kinds:
            # Anthropic's own words: after them Claude Code sends no more tools in messages.
            raise WrongCall(
                f"Input tag '{kind}' found using 'type' does not match any of the tags that chat completions have "
                f"here, {', '.join(kinds)}; omit this part"
            )
    return blocks


def _texts(blocks: list[Document]) -> list[str]:
    return [block["text"] for block in blocks if block["type"] == "text" and block.get("text")]


def _system(content: Any) -> Iterator[Document]:
    """Yields the texts of a system's content as one message, or nothing."""
    if words := "".join(map(_without_billing, _texts(_blocks(content, _OF_SYSTEM)))):
        yield {"role": "system", "content": words}


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(_BILLING) else text


def _messages(messages: Any) -> Iterator[Document]:
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise WrongCall(f"a message has role {role!r}; set it to user, assistant or system")
        if role == "system":
            yield from _system(content)
        elif isinstance(content, str):
            yield {"role": role, "content": content}
        elif role == "assistant":
            yield _assistant(_blocks(content, _OF_ASSISTANT))
        else:
            yield from _user(_blocks(content, _OF_USER))


def _assistant(blocks: list[Document]) -> Document:
    message: Document = {"role": "assistant"}
    if texts := _texts(blocks):
        message["content"] = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
    thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
    if thoughts:
        # vLLM's own name is `reasoning`, but it also accepts this one.
        message["reasoning_content"] = "".join(thoughts)
    calls = [_call(block) for block in blocks if block["type"] == "tool_use"]
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Mapping[str, Any]) -> Document:
    arguments = json.dumps({**(block.get("input") or {})})
    return {"id": block.get("id"), "type": "function", "function": {"name": block.get("name"), "arguments": arguments}}


def _user(blocks: list[Document]) -> Iterator[Document]:
    """Yields each tool result as a message, and then the texts and images as another."""
    parts: list[Document] = []
    for block in blocks:
        if block["type"] == "tool_result":
            yield from _result(block)
        elif block["type"] == "image":
            parts.append(_image(block["source"]))
        elif block.get("text"):
            parts.append({"type": "text", "text": block["text"]})
    if parts:
        yield {"role": "user", "content": parts[0].get("text", parts) if len(parts) == 1 else parts}


def _result(block: Mapping[str, Any]) -> Iterator[Document]:
    """Yields the result of a tool. The tools that it names, as Claude Code's search for tools does, follow as a message
    of their own, as in vLLM: some templates show the tools there."""
    blocks, call_id = _blocks(block.get("content"), _OF_RESULT), block.get("tool_use_id")
    images = [_image(part["source"]) for part in blocks if part["type"] == "image"]
    yield from results(call_id, "\n".join(part["text"] for part in blocks if part["type"] == "text"), images)
    names = [part["tool_name"] for part in blocks if part["type"] == "tool_reference"]
    if names:
        references = [{"type": "tool_reference", "name": name} for name in names]
        yield {"role": "tool", "tool_call_id": call_id, "content": references}


def _image(source: Mapping[str, Any]) -> Document:
    if source["type"] not in ("url", "base64"):
        raise WrongCall(f"an image has a source of type {source['type']}; send its URL, or its data in base64")
    return image_part(source["url"] if source["type"] == "url" else data_url(source["media_type"], source["data"]))


def _tool(tool: Document) -> Document:
    if "input_schema" not in tool:
        raise WrongCall(
            f"tool {tool.get('name')!r} has no input_schema: it is one of Anthropic's own tools, which the engine does "
            "not provide; set input_schema, or omit the tool"
        )
    refuse(tool, "input_examples", "engines show a model no examples; describe them in the description")
    schema = tool["input_schema"]
    parameters = {**schema, "type": schema.get("type", "object")}
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": parameters}
    return {"type": "function", "function": function | {name: tool[name] for name in _OF_TOOL if tool.get(name)}}


def _tool_choice(choice: Mapping[str, Any]) -> Any:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind not in _CHOICES:
        raise WrongCall(f"tool_choice.type is {kind!r}; expected one of tool, {', '.join(_CHOICES)}")
    return _CHOICES[kind]


def _output(config: Mapping[str, Any]) -> Document:
    chat: Document = {}
    if asked := config.get("format"):
        if asked["type"] != "json_schema":
            raise WrongCall(f"output_config.format has type {asked['type']}; set it to json_schema")
        schema = {"name": "json_schema", "schema": asked["schema"]}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if effort := config.get("effort"):
        chat["reasoning_effort"] = effort
    return chat


def _thinking(config: Mapping[str, Any]) -> Document:
    kind = config["type"]
    if kind not in ("adaptive", "disabled", "enabled"):
        raise WrongCall(f"thinking.type is {kind!r}; set it to adaptive, disabled or enabled")
    if kind == "enabled":
        return {"thinking_token_budget": config["budget_tokens"]}
    return {"reasoning_effort": "none"} if kind == "disabled" else {}


# Answers.


class MessageWriter:
    """Writes the events of a streamed message."""

    def begun(self, answer: Completion) -> Iterator[bytes]:
        usage = {**_usage(answer), "output_tokens": 0}
        nothing: Document = {"content": [], "stop_reason": None, "stop_sequence": None}
        yield _event_of("message_start", message={**_message(answer), **nothing, "usage": usage})

    def opened(self, block: Block) -> Iterator[bytes]:
        kinds: dict[str, Document] = {
            "thought": {"type": "thinking", "thinking": ""},
            "text": {"type": "text", "text": ""},
            "call": {"type": "tool_use", "id": block.id, "name": block.name, "input": {}},
        }
        yield _event_of("content_block_start", index=block.number, content_block=kinds[block.kind])

    def extended(self, block: Block, text: str) -> Iterator[bytes]:
        kind, name = _DELTAS[block.kind]
        yield _event_of("content_block_delta", index=block.number, delta={"type": kind, name: text})

    def closed(self, block: Block) -> Iterator[bytes]:
        if block.kind == "thought":
            delta = {"type": "signature_delta", "signature": _signature()}
            yield _event_of("content_block_delta", index=block.number, delta=delta)
        yield _event_of("content_block_stop", index=block.number)

    def ended(self, answer: Completion) -> Iterator[bytes]:
        yield _event_of("message_delta", delta=_stop(answer), usage=_usage(answer))
        yield _event_of("message_stop")

    def failed(self, message: str) -> Iterator[bytes]:
        yield _event_of("error", error={"type": "api_error", "message": message})


_DELTAS = {
    "thought": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


def _message(answer: Completion) -> Document:
    return {"id": answer.id, "type": "message", "role": "assistant", "model": answer.model}


def _content(block: Block) -> Document:
    if block.kind == "thought":
        return {"type": "thinking", "thinking": block.text, "signature": _signature()}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": written(block.arguments)}


def _signature() -> str:
    return uuid.uuid4().hex


def _usage(answer: Completion) -> Document:
    usage = answer.usage
    return {"input_tokens": usage.get("prompt_tokens", 0), "output_tokens": usage.get("completion_tokens", 0)}


def _stop(answer: Completion) -> Document:
    """Returns the stop reason, and the stop sequence if the engine names one. Engines name a call of a tool that the
    agent chose a stop, and may stop within a call."""
    finish, calls = answer.finish or "stop", [block for block in answer.blocks if block.kind == "call"]
    if finish in ("stop", "tool_calls"):
        if isinstance(answer.stop, str) and not (calls and calls[-1].is_whole):
            return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop}
        finish = "tool_calls" if calls else finish
    return {"stop_reason": _STOPS.get(finish), "stop_sequence": None}


def _event_of(kind: str, **content: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + orjson.dumps({"type": kind, **content}) + b"\n\n"
