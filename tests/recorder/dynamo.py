"""A Dynamo of tests: it answers in the form of Dynamo 1.6.1's frontend, over real HTTP.

The forms were compared with those of a Dynamo 1.6.1 whose worker is scripted (tests/engines/dynamo). Their sources are
`lib/llm/src/protocols/openai` of ai-dynamo/dynamo (pull requests 9509 and 13640), and of `engine_data`
`components/src/dynamo/vllm/handlers.py`. Unknown extra fields are ignored, and other wrong types are refused.

The last message, or the prompt, says what is answered: `say WORDS`, `fail` (an error in a stream, after its first
chunk), `cut` (the connection is lost there). A token is a byte, as in tests/recorder/engine.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.recorder.engine import END, logprobs_for, prompt_of, send_chunks, tokens_of

NAMES = ("completion_token_ids", "prompt_token_ids", "engine_data")
_STEP = 2


@dataclass
class Dynamo:
    """One that listens at `url`.

    gives: what it gives of NAMES: not all engines behind Dynamo fill `engine_data`, and with
    DYN_ENABLE_FRONTEND_NVEXT=false there is nothing. lacks: how many of the last logprobs are missing. more: tokens of
    `engine_data` behind those of the answer, as if Dynamo had ended it at a stop string. skips: the place of a token
    that is missing in the named field, as if a parser had lost it.
    """

    gives: tuple[str, ...] = NAMES
    lacks: int = 0
    more: int = 0
    skips: int = -1
    port: int = 0
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "toy", "object": "model", "owned_by": "nvidia"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await self._answer(request, body, prompt_of(body["messages"]), body["messages"][-1]["content"], True)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body["prompt"]
        return await self._answer(request, body, tokens_of(prompt), prompt, False)

    async def _answer(
        self, request: web.Request, body: dict[str, Any], prompt: list[int], script: str, is_chat: bool
    ) -> web.StreamResponse:
        self.requests.append(body)
        extension = body.get("nvext") or {}
        names = extension.get("extra_fields") or [] if isinstance(extension, dict) else ()
        if not isinstance(names, list):
            message = "Failed to deserialize the JSON body into the target type: invalid type"
            return web.json_response({"message": message, "type": "Bad Request", "code": 400}, status=400)
        answer = _Answer(self, body, prompt, script.removeprefix("say "), is_chat, [*names])
        if not body.get("stream"):
            return web.json_response(answer.whole())
        failed = iter([{"error": {"message": "Internal server error", "type": "internal_server_error", "code": 500}}])
        chunks = [*answer.chunks()]
        events = [chunks[0], *failed] if script == "fail" else chunks
        return await send_chunks(request, iter(events), 1 if script == "cut" else None)


class _Answer:
    def __init__(
        self, dynamo: Dynamo, body: dict[str, Any], prompt: list[int], text: str, is_chat: bool, names: list[str]
    ) -> None:
        self._dynamo, self._body, self._prompt, self._text, self._is_chat = dynamo, body, prompt, text, is_chat
        self._names = {name for name in names if name in dynamo.gives}
        self._tokens = [*tokens_of(text), END]
        self._logprobs = logprobs_for(len(self._tokens))[: len(self._tokens) - dynamo.lacks]
        asked = body.get("logprobs")
        self._has_logprobs = bool(asked) if is_chat else asked is not None

    def whole(self) -> dict[str, Any]:
        message = {"content": self._text, "refusal": None, "role": "assistant"}
        words: dict[str, Any] = {"message": message} if self._is_chat else {"text": self._text}
        choice = {**words, **self._choice(0, len(self._tokens))}
        answer = self._form("", [choice]) | {"usage": self._usage()}
        return answer | self._extension(0, len(self._tokens))

    def chunks(self) -> Iterator[dict[str, Any]]:
        count = len(self._tokens)
        for begin in range(0, count, _STEP):
            text = bytes(token for token in self._tokens[begin : begin + _STEP] if token != END).decode()
            role = {"role": "assistant"} if begin == 0 else {}
            delta = {"delta": {**({"content": text} if text else {}), **role}} if self._is_chat else {"text": text}
            choice = {**delta, **self._choice(begin, begin + _STEP)}
            yield self._form(".chunk", [choice]) | self._extension(begin, begin + _STEP)
        if (self._body.get("stream_options") or {}).get("include_usage"):
            yield self._form(".chunk", []) | {"usage": self._usage()}

    def _form(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = f"chat.completion{kind}" if self._is_chat else "text_completion"
        return {"id": "cmpl-1", "created": 1, "model": "toy", "object": name, "choices": choices}

    def _usage(self) -> dict[str, int]:
        return {"prompt_tokens": len(self._prompt), "completion_tokens": len(self._tokens)}

    def _choice(self, begin: int, end: int) -> dict[str, Any]:
        """Of a completion, no field is null."""
        finish = "stop" if end >= len(self._tokens) else None
        if self._is_chat:
            return {"index": 0, "finish_reason": finish, "logprobs": self._chat_logprobs(begin, end)}
        ended = {"finish_reason": finish} if finish else {}
        values = {"token_logprobs": self._logprobs[begin:end], "text_offset": []}
        return {"index": 0, **ended, **({"logprobs": values} if self._has_logprobs else {})}

    def _chat_logprobs(self, begin: int, end: int) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        content = [{"token": "", "logprob": value, "top_logprobs": []} for value in self._logprobs[begin:end]]
        return {"content": content, "refusal": None}

    def _extension(self, begin: int, end: int) -> dict[str, Any]:
        places = [place for place in range(len(self._tokens))[begin:end] if place != self._dynamo.skips]
        values: dict[str, Any] = {"completion_token_ids": [self._tokens[place] for place in places]}
        if end >= len(self._tokens):
            values |= {"prompt_token_ids": self._prompt, "engine_data": self._engine_data()}
        named = {name: value for name, value in values.items() if name in self._names}
        return {"nvext": named} if named else {}

    def _engine_data(self) -> dict[str, Any]:
        """vLLM's worker omits the logprobs if their number is another one."""
        tokens = [*self._tokens, *[END] * self._dynamo.more]
        data = {"prompt_token_ids": self._prompt, "completion_token_ids": tokens, "finished": True}
        is_aligned = self._has_logprobs and not self._dynamo.lacks
        return {**data, "completion_logprobs": logprobs_for(len(tokens))} if is_aligned else data
