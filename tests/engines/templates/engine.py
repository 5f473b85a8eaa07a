"""An engine that renders by real templates and tokenizers, with vLLM's fields. What its model says is scripted."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar
from uuid import uuid4

from aiohttp import web

from tests.engines.templates.families import Family
from tests.engines.templates.model import Answer
from tests.recorder.engine import send_chunks

MARK = re.compile(r"q\d+-\d+-")
_BASE = {"created": 1, "model": "toy"}


@dataclass
class ScriptedEngine:
    """scripts: the answer to a call, by the mark of its last message. asked: prompt and request of each call of the
    recorder, by the same mark. api: its name for the recorder. has_model: whether a real model says the answers."""

    api: ClassVar[str] = "vllm"
    has_model: ClassVar[bool] = False

    family: Family
    scripts: dict[str, Answer] = field(default_factory=dict)
    asked: dict[str, tuple[list[int], Mapping[str, Any]]] = field(default_factory=dict)
    url: str = ""
    port: int = 0

    def app(self) -> web.Application:
        raise NotImplementedError

    def logprobs(self, mark: str) -> list[float]:
        """Returns those of the answer to a call."""
        return self.scripts[mark].logprobs


class TemplateEngine(ScriptedEngine):
    """Renders by the family's template and tokenizer."""

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/tokenize", self._tokenize)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "toy", "object": "model"}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        return self._rendered(await request.json())

    def _rendered(self, body: Mapping[str, Any]) -> web.Response:
        try:
            tokens = self.family.encode(self.family.render(body["messages"], body))
        except (TypeError, ValueError) as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": 1 << 20})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        if prompt is None:
            try:
                prompt = self.family.encode(self.family.render(body["messages"], body))
            except (TypeError, ValueError) as error:
                return web.json_response({"error": {"message": str(error), "code": 400}}, status=400)
        answer = self.answer(prompt, body)
        # Claude Code joins answers with the same id.
        base = {"id": f"chatcmpl-{uuid4().hex}", **_BASE}
        if body.get("stream"):
            return await send_chunks(request, _chunks(base, body, prompt, answer), None)
        message: dict[str, Any] = {"role": "assistant", "content": answer.text or None}
        message |= {"reasoning": answer.thoughts} if answer.thoughts else {}
        message |= {"tool_calls": calls_of(answer)} if answer.calls else {}
        choice = {"index": 0, "message": message, **_end(body, answer)}
        more = {"object": "chat.completion", "choices": [choice], "usage": _usage(prompt, answer)}
        return web.json_response({**base, **more, **_prompt(body, prompt)})

    def answer(self, prompt: list[int], body: Mapping[str, Any]) -> Answer:
        """What the model says to a call."""
        mark = mark_of(body)
        if not mark:
            return Answer([1], "")
        if body.get("return_token_ids"):
            self.asked[mark] = prompt, body
        return self.scripts[mark]


def mark_of(body: Mapping[str, Any]) -> str:
    """Returns the mark of a call's last message, or nothing."""
    return next(iter(MARK.findall(_text(body["messages"][-1]))[-1:]), "")


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def calls_of(answer: Answer) -> list[dict[str, Any]]:
    return [
        {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
        for identity, name, arguments in answer.calls
    ]


def _prompt(body: Mapping[str, Any], prompt: list[int]) -> dict[str, Any]:
    """vLLM has null for what was not requested."""
    return {"prompt_token_ids": prompt if body.get("return_token_ids") else None}


def _end(body: Mapping[str, Any], answer: Answer) -> dict[str, Any]:
    logprobs: list[dict[str, Any]] = [
        {"token": "t", "logprob": each, "bytes": None, "top_logprobs": []} for each in answer.logprobs
    ]
    return {
        "finish_reason": answer.finish,
        "stop_reason": answer.stop,
        "token_ids": answer.tokens if body.get("return_token_ids") else None,
        "logprobs": {"content": logprobs} if body.get("logprobs") else None,
    }


def _usage(prompt: list[int], answer: Answer) -> dict[str, int]:
    read, sampled = len(prompt), len(answer.tokens)
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}


def _chunks(
    base: Mapping[str, Any], body: Mapping[str, Any], prompt: list[int], answer: Answer
) -> Iterator[dict[str, Any]]:
    """The words come at once; the tokens with the end."""
    base = {**base, "object": "chat.completion.chunk"}
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning": answer.thoughts}] if answer.thoughts else []
    deltas += [{"content": answer.text}] if answer.text else []
    deltas += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(calls_of(answer))]
    for number, delta in enumerate(deltas):
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        yield {**base, **({} if number else _prompt(body, prompt)), "choices": [choice]}
    yield {**base, "choices": [{"index": 0, "delta": {}, **_end(body, answer)}]}
    if (body.get("stream_options") or {}).get("include_usage"):
        yield {**base, "choices": [], "usage": _usage(prompt, answer)}
