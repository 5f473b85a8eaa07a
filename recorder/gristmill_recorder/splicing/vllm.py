"""vLLM's routes for splicing: renders conversations, and takes a prompt as tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from multidict import CIMultiDict

from gristmill_recorder.engine import Engine
from gristmill_recorder.refusals import RefusalError
from gristmill_recorder.splicing.conversation import Document

_RENDER, _TOKENIZE = "v1/chat/completions/render", "tokenize"
_UNKNOWN_ROUTE = (403, 404, 405)
_IDS = "prompt_token_ids"
_TRANSFER = "kv_transfer_params"
# Fields that `render` does not need, and fields that `/tokenize` has in common with a chat completion.
_NOT_RENDERED = frozenset((_TRANSFER, "stream", "stream_options"))
_TOKENIZED = ("model", "messages", "tools", "chat_template", "add_special_tokens", "mm_processor_kwargs")
# Calls with these fields are not rendered from their messages alone, or vLLM does not take tokens for them.
_NOT_SPLICED = ("continue_final_message", "truncate_prompt_tokens", "echo")


def takes_tokens(request: Mapping[str, Any]) -> bool:
    """Returns whether vLLM would take the prompt of this chat completion as tokens, and the agent does not send any."""
    is_continued = any(request.get(name) for name in _NOT_SPLICED) or request.get("add_generation_prompt") is False
    return not is_continued and _IDS not in (request.get(_TRANSFER) or {})


def with_tokens(request: Document, prompt: Sequence[int]) -> Document:
    """Returns the chat completion with a prompt of tokens. Its messages stay, because vLLM's parsers read them."""
    return {**request, _TRANSFER: {**(request.get(_TRANSFER) or {}), _IDS: list(prompt)}}


class Renderer:
    """Renders conversations by `/v1/chat/completions/render`, which needs `--enable-scale-out`, or by `/tokenize`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._has_render = True

    async def render(
        self, request: Document, conversations: Sequence[list[Document]], headers: Mapping[str, str]
    ) -> list[list[int]] | None:
        """Returns the prompts of the request with these messages; None if the engine does not render one of them."""
        asked = (self._render({**request, "messages": messages}, headers) for messages in conversations)
        prompts = await asyncio.gather(*asked)
        rendered = [prompt for prompt in prompts if prompt]
        return rendered if len(rendered) == len(prompts) else None

    async def _render(self, request: Document, headers: Mapping[str, str]) -> list[int] | None:
        if self._has_render:
            body = {name: value for name, value in request.items() if name not in _NOT_RENDERED}
            status, answer = await self._post(_RENDER, body, headers)
            if status not in _UNKNOWN_ROUTE:
                return answer.get("token_ids")
            self._has_render = False
        return (await self._post(_TOKENIZE, tokenize_request(request), headers))[1].get("tokens")

    async def _post(self, path: str, body: Document, headers: Mapping[str, str]) -> tuple[int, Document]:
        """Returns the status and the answer; an empty one if the engine cannot be reached."""
        try:
            async with self._engine.call("POST", path, "", CIMultiDict(headers), orjson.dumps(body)) as answer:
                document = orjson.loads(await answer.read()) if answer.status == 200 else {}
                return answer.status, document if isinstance(document, dict) else {}
        except (RefusalError, orjson.JSONDecodeError, TypeError):
            return 0, {}


def tokenize_request(request: Mapping[str, Any]) -> Document:
    """Returns the call of `/tokenize` that renders like this chat completion. Some fields it takes as kwargs only."""
    kwargs: Document = {"documents": request["documents"]} if request.get("documents") else {}
    if effort := request.get("reasoning_effort"):
        kwargs |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    kwargs |= request.get("chat_template_kwargs") or {}
    body = {name: request[name] for name in _TOKENIZED if request.get(name) is not None}
    return {**body, "chat_template_kwargs": kwargs} if kwargs else body
