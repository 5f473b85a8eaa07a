"""An engine of tests that answers in vLLM's form, or in SGLang's, over real HTTP. Its words are scripted.

The forms are those of vLLM's `entrypoints/openai/{chat_completion,completion,responses}/{protocol,serving}.py` (commit
002032ee of vllm-project/vllm) and of SGLang's `srt/entrypoints/openai/{protocol,serving_chat}.py` (pull requests 30917
and 34488 of sgl-project/sglang): which fields there are, on which chunk each stands, what is asked for by which name,
and what is refused.

A token is a byte of the text; 256 and 257 begin and end a turn, as in ChatML. The last message says what is answered:
`say WORDS`, `think WORDS; WORDS` (reasoning, then words), `call NAME JSON` (a tool), `hold NAME WORDS` (once the test
lets NAME go), `short WORDS` (cut at a length: without END), or what goes wrong: `fail STATUS`, `cut AFTER` (tokens),
`wait SECONDS WORDS`, `tokenless WORDS`, `mute`; `words JSON` has all fields of Words.
`reload WORDS` samples the first two tokens by weights 3 and the rest by 4, and has routes that nobody asked for.
Anything else is answered with `ok`.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from aiohttp import web

from tests.recorder.engine_experts import experts_of, npy
from tests.recorder.engine_responses import events, response

BEGIN, END = 256, 257
FAILURE = {"error": {"message": "failed on request", "type": "BadRequestError", "param": None, "code": 400}}


@dataclass(frozen=True)
class Words:
    """What is said: in this order, as the model's own tokens. id: of the answer, and of the call of the tool;
    then: calls of tools after it."""

    reasoning: str = ""
    text: str = ""
    tool: tuple[str, str] | None = None
    is_cut: bool = False
    id: str = "call-1"
    then: tuple[tuple[str, str], ...] = ()

    @property
    def spoken(self) -> str:
        return self.thought + self.text + "".join(map(_spoken_call, self.calls))

    @property
    def thought(self) -> str:
        return f"<think>{self.reasoning}</think>" if self.reasoning else ""

    @property
    def calls(self) -> list[dict[str, Any]]:
        tools = [self.tool, *self.then] if self.tool else []
        return [_call(tool, self.id + f"-{number}" * bool(number)) for number, tool in enumerate(tools)]


def _call(tool: tuple[str, str], call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": tool[0], "arguments": tool[1]}}


def prompt_logprobs_of(prompt: list[int]) -> list[dict[str, Any] | None]:
    """As vLLM gives them with `prompt_logprobs: 0`: of each token but the first."""
    values = logprobs_for(len(prompt))
    entries = zip(prompt[1:], values[1:], strict=True)
    return [None, *({str(token): {"logprob": value, "rank": 9, "decoded_token": ""}} for token, value in entries)]


def _spoken_call(call: Mapping[str, Any]) -> str:
    return f"<tool_call>{call['function']['name']} {call['function']['arguments']}</tool_call>"


def tokens_of(text: str) -> list[int]:
    return list(text.encode())


def turn(role: str, text: str) -> list[int]:
    """A finished turn in a prompt. An answer's own tokens are its text and END."""
    return [BEGIN, *tokens_of(f"{role}\n{text}"), END, *tokens_of("\n")]


IMAGE = "<image><image>"
"""What a prompt has for each image: as with real models, as many placeholders as its size asks for."""


def prompt_of(messages: list[Mapping[str, Any]]) -> list[int]:
    """The chat template."""
    turns = [token for message in messages for token in turn(message["role"], _spoken(message, IMAGE))]
    return [*turns, BEGIN, *tokens_of("assistant\n")]


def answer_of(words: Words) -> list[int]:
    return [*tokens_of(words.spoken), *(() if words.is_cut else (END,))]


def logprobs_for(count: int) -> list[float]:
    """Of a choice's tokens, exact as float32."""
    return [-(position % 64 + 1) / 64 for position in range(count)]


def _spoken(message: Mapping[str, Any], image: str = "") -> str:
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "".join(part.get("text", image) for part in content)
    reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
    return Words(reasoning, text).spoken + "".join(map(_spoken_call, message.get("tool_calls") or ()))


@dataclass
class Engine:
    """One that listens at `url` and remembers what it was asked. is_sglang: whose form it answers in. let_go: the names
    of calls that are held no longer. has_render: whether it renders chat completions, as with vLLM's
    `--enable-scale-out`. takes_tokens: whether it takes a prompt as tokens. template: what `/tokenize` renders
    by, after renders_after_s.
    says: the script of every answer, whatever the messages say."""

    is_sglang: bool = False
    port: int = 0
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    cancelled: int = 0
    let_go: set[str] = field(default_factory=set)
    has_render: bool = False
    takes_tokens: bool = True
    template: Callable[[list[Mapping[str, Any]]], Any] = prompt_of
    renders_after_s: float = 0.0
    says: str = ""
    is_incremental: bool = False
    rendered: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/responses", self._responses)
        app.router.add_post("/v1/embeddings", self._embeddings)
        app.router.add_post("/inference/v1/generate", self._vllm_generate)
        app.router.add_post("/generate", self._sglang_generate)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/chat/completions/render", self._render)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "toy", "object": "model", "owned_by": "vllm"}]})

    async def _embeddings(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": []})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        self.rendered.append(("tokenize", body))
        await asyncio.sleep(self.renders_after_s)
        tokens = self.template(body["messages"])
        return web.json_response({"count": 0, "max_model_len": 1 << 20, "tokens": tokens})

    async def _render(self, request: web.Request) -> web.Response:
        if not self.has_render:
            return web.json_response({"error": "start the server with --enable-scale-out"}, status=403)
        body: dict[str, Any] = await request.json()
        self.rendered.append(("render", body))
        return web.json_response({"token_ids": prompt_of(body["messages"]), "sampling_params": {}})

    async def _read(self, request: web.Request) -> dict[str, Any]:
        body: dict[str, Any] = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        return body

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._read(request)
        transfer = body.get("kv_transfer_params") or {}
        if not isinstance(transfer, dict):
            return _refused("kv_transfer_params: Input should be a valid dictionary")
        given = body.get("input_ids") if self.is_sglang else transfer.get("prompt_token_ids")
        prompt = (self.takes_tokens and given) or prompt_of(body["messages"])
        return await self._answer(request, body, [prompt], self.says or _spoken(body["messages"][-1]), "chat")

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._read(request)
        given = body["prompt"]
        prompts = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
        tokens = [tokens_of(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        return await self._answer(request, body, tokens, str(prompts[0]), "completion")

    async def _vllm_generate(self, request: web.Request) -> web.StreamResponse:
        body = await self._read(request)
        settings = body["sampling_params"]
        asked = {**body, **{name: settings.get(name) for name in ("n", "logprobs", "prompt_logprobs")}}
        prompt = body["token_ids"]
        return await self._answer(request, asked, [prompt], bytes(prompt).decode(), "completion")

    async def _sglang_generate(self, request: web.Request) -> web.StreamResponse:
        """Each event of a stream has all tokens so far, unless `is_incremental`."""
        body = await self._read(request)
        tokens = answer_of(_words(bytes(body["input_ids"]).decode()))
        ends = range(1, len(tokens) + 1) if tokens and body.get("stream") else (len(tokens),)
        answers = [self._generated(tokens, end, bool(body.get("return_logprob"))) for end in ends]
        return await send_chunks(request, iter(answers), None) if body.get("stream") else web.json_response(answers[0])

    def _generated(self, tokens: list[int], end: int, has_logprobs: bool) -> dict[str, Any]:
        begin = end - 1 if self.is_incremental else 0
        meta: dict[str, Any] = {"id": "1", "completion_tokens": end, "finish_reason": None}
        if end == len(tokens):
            meta["finish_reason"] = {"type": "stop", "matched": END}
        if has_logprobs:
            values = logprobs_for(len(tokens))
            meta["output_token_logprobs"] = [[values[place], tokens[place], None] for place in range(begin, end)]
        return {"text": "", "output_ids": tokens[begin:end], "meta_info": meta}

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        body = await self._read(request)
        given = body["input"]
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
        script = _spoken(messages[-1])
        if (failure := _failure(script)) is not None:
            return failure
        words = _words(script)
        has_messages = bool(body.get("enable_response_messages"))
        answer = response(words.text, prompt_of(messages), answer_of(words), has_messages=has_messages)
        if not body.get("stream"):
            return web.json_response(answer)
        return await _send_events(request, events(words.text, answer))

    async def _answer(
        self, request: web.Request, body: dict[str, Any], prompts: list[list[int]], script: str, kind: str
    ) -> web.StreamResponse:
        if (failure := _failure(script)) is not None:
            return failure
        if self.is_sglang and kind == "chat" and body.get("stream") and body.get("return_token_ids"):
            return _refused("return_token_ids is not supported with streaming on /v1/chat/completions.")
        if script.startswith("wait "):
            try:
                await asyncio.sleep(float(script.split()[1]))
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if script.startswith("hold "):
            while script.split()[1] not in self.let_go:
                await asyncio.sleep(0.005)
        form = _Form(self.is_sglang, kind, body, script)
        count = body.get("n") or 1
        said = [_words(script, number) for number in range(count)] * len(prompts)
        if body.get("stream"):
            cut = int(script.split()[1]) if script.startswith("cut ") else None
            return await send_chunks(request, form.chunks(prompts, said, count), cut)
        return web.json_response(form.whole(prompts, said, count), headers={"x-request-id": "engine-1"})


def _failure(script: str) -> web.Response | None:
    if not script.startswith("fail "):
        return None
    headers = {"retry-after": "0", "x-engine": "busy"}
    return web.json_response(FAILURE, status=int(script.split()[1]), headers=headers)


def _refused(message: str) -> web.Response:
    return web.json_response(
        {"object": "error", "message": message, "type": "BadRequestError", "code": 400}, status=400
    )


def _words(script: str, number: int = 0) -> Words:
    """Later choices of one call say their number too, or nothing (`words`)."""
    verb, _, rest = script.partition(" ")
    more = f" #{number}" if number else ""
    if verb == "think":
        reasoning, _, text = rest.partition("; ")
        return Words(reasoning, text + more)
    if verb == "call":
        name, _, arguments = rest.partition(" ")
        return Words(tool=(name, arguments))
    if verb == "words":
        return Words(is_cut=True) if number else Words(**json.loads(rest))
    if verb in ("wait", "hold"):
        return Words(text=rest.partition(" ")[2] + more)
    if verb == "cut":
        return Words(text="a long answer that is cut")
    if verb == "short":
        return Words(text=rest, is_cut=True)
    if verb in ("say", "tokenless", "reload"):
        return Words(text=rest + more)
    return Words(text="ok" + more)


class _Form:
    """Answers in the form of one API of one engine."""

    def __init__(self, is_sglang: bool, kind: str, body: Mapping[str, Any], script: str) -> None:
        self._is_sglang, self._kind, self._body = is_sglang, kind, body
        has_ids = not script.startswith("tokenless")
        self._has_ids = has_ids and bool(body.get("return_token_ids"))
        self._has_extension = has_ids and bool(body.get("return_output_ids_in_sglext"))
        self._is_reloaded = script.startswith("reload ")
        # Its newer name (sglang 35225, 38459).
        self._has_them_by_choice = kind == "completion" and "prompt" in body
        self._ids = "response_token_ids" if is_sglang else "token_ids"
        asked = body.get("logprobs")
        self._has_logprobs = bool(asked) if kind == "chat" else asked is not None
        self._base = {"id": f"{kind}-{_words(script).id}", "created": 1, "model": body.get("model", "toy")}
        self._object = {"chat": "chat.completion", "completion": "text_completion"}[kind]

    def whole(self, prompts: list[list[int]], said: list[Words], count: int) -> dict[str, Any]:
        choices = [self._choice(index, words, prompts[index // count]) for index, words in enumerate(said)]
        answer = {**self._base, "object": self._object, "choices": choices, "usage": _usage(prompts, said)}
        if self._kind == "chat" and not self._is_sglang:
            answer |= self._requested(prompt_token_ids=prompts[0])
        if not self._has_them_by_choice:
            answer |= self._prompt_logprobs(prompts[0])
        if self._has_extension:
            answer["sglext"] = self._extension(prompts, said)
        if self._is_reloaded and self._is_sglang:
            answer["metadata"] = {"weight_version": "4", "weight_versions": _spans(answer_of(said[0]))}
        return answer

    def _choice(self, index: int, words: Words, prompt: list[int]) -> dict[str, Any]:
        tokens = answer_of(words)
        choice: dict[str, Any] = {"index": index, "finish_reason": _finish(words), "logprobs": None}
        if self._kind == "chat":
            choice["message"] = _message(words)
        else:
            choice["text"] = words.spoken
        if self._has_logprobs:
            choice["logprobs"] = self._logprobs(tokens, logprobs_for(len(tokens)))
        choice |= self._requested(**{self._ids: tokens})
        if self._kind == "completion" or self._is_sglang:
            choice |= self._requested(prompt_token_ids=prompt)
        if self._has_them_by_choice:
            choice |= self._prompt_logprobs(prompt)
        return choice | self._reloaded(tokens)

    def _prompt_logprobs(self, prompt: list[int]) -> dict[str, Any]:
        is_asked = self._body.get("prompt_logprobs") is not None
        return {} if self._is_sglang else {"prompt_logprobs": prompt_logprobs_of(prompt) if is_asked else None}

    def _requested(self, **tokens: list[int]) -> dict[str, Any]:
        """vLLM has null for what was not requested, and SGLang nothing."""
        return tokens if self._has_ids else {} if self._is_sglang else dict.fromkeys(tokens)

    def _reloaded(self, tokens: list[int]) -> dict[str, Any]:
        """What a choice has at its end."""
        if END in (self._body.get("stop_token_ids") or ()):
            return {"stop_reason": tokens[-1]}
        if not self._is_reloaded or self._is_sglang:
            return {}
        versions = {"weight_versions": _spans(tokens)} if self._body.get("return_weight_versions") else {}
        return {"routed_experts": npy(experts_of(tokens)), **versions}

    def chunks(self, prompts: list[list[int]], said: list[Words], count: int) -> Iterator[dict[str, Any]]:
        """A token a chunk, choices by turns."""
        base = {**self._base, "object": {"chat": "chat.completion.chunk"}.get(self._kind, "text_completion")}
        if self._kind == "chat":
            for index in range(len(said)):
                chunk = {**base, "choices": [{"index": index, "delta": {"role": "assistant", "content": ""}}]}
                yield chunk if self._is_sglang else chunk | self._requested(prompt_token_ids=prompts[0])
        tokens = [answer_of(words) for words in said]
        for position in range(max(map(len, tokens))):
            for index, words in enumerate(said):
                if position < len(tokens[index]):
                    part = self._part(words, tokens[index], position)
                    if self._kind == "completion" and not position:
                        part |= self._requested(prompt_token_ids=prompts[index // count])
                    yield {**base, "choices": [{"index": index, **part}]}
        if self._has_extension:
            yield {**base, "choices": [], "sglext": self._extension(prompts, said)}
        if (self._body.get("stream_options") or {}).get("include_usage"):
            yield {**base, "choices": [], "usage": _usage(prompts, said)}

    def _part(self, words: Words, tokens: list[int], position: int) -> dict[str, Any]:
        is_last = position == len(tokens) - 1
        text = "" if tokens[position] == END else bytes([tokens[position]]).decode("latin-1")
        part: dict[str, Any] = {"finish_reason": _finish(words) if is_last else None, "logprobs": None}
        if self._kind == "completion":
            part["text"] = text
        else:
            part["delta"] = _delta(words, text, position)
        if self._has_logprobs:
            part["logprobs"] = self._logprobs([tokens[position]], [logprobs_for(len(tokens))[position]])
        if self._kind == "completion" or not self._is_sglang:
            part |= self._requested(**{self._ids: [tokens[position]]})
        return part | self._reloaded(tokens) if is_last else part

    def _logprobs(self, tokens: list[int], values: list[float]) -> dict[str, Any]:
        if self._kind == "completion":
            names = [f"token_id:{token}" for token in tokens]
            return {"text_offset": [0] * len(tokens), "token_logprobs": values, "tokens": names, "top_logprobs": []}
        return {
            "content": [
                {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
                for token, value in zip(tokens, values, strict=True)
            ]
        }

    def _extension(self, prompts: list[list[int]], said: list[Words]) -> dict[str, Any]:
        routes = {"routed_experts": "bnB5"} if self._is_reloaded else {}
        return {"input_ids": prompts[0], "output_ids": [answer_of(words) for words in said], **routes}


def _spans(tokens: list[int]) -> list[dict[str, Any]]:
    return [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": len(tokens)}]


def _message(words: Words) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": words.text or None}
    more = {"reasoning": words.reasoning, "tool_calls": words.calls}
    return message | {name: value for name, value in more.items() if value}


def _delta(words: Words, text: str, position: int) -> dict[str, Any]:
    """A tool call is one chunk; control tokens have no text."""
    thought, said = len(words.thought.encode()), len((words.thought + words.text).encode())
    if position < thought:
        is_spoken = len("<think>") <= position < thought - len("</think>")
        return {"reasoning": text} if is_spoken else {}
    if words.tool and position >= said:
        return {"tool_calls": [{"index": n, **call} for n, call in enumerate(words.calls)]} if position == said else {}
    return {"content": text} if text else {}


def _finish(words: Words) -> str:
    return "length" if words.is_cut else "tool_calls" if words.tool else "stop"


def _usage(prompts: list[list[int]], said: list[Words]) -> dict[str, int]:
    read, sampled = sum(map(len, prompts)), sum(len(answer_of(words)) for words in said)
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}


async def _send_events(request: web.Request, events: Iterator[dict[str, Any]]) -> web.StreamResponse:
    response = await _streaming(request)
    for event in events:
        await response.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
    return response


async def send_chunks(request: web.Request, chunks: Iterator[dict[str, Any]], cut: int | None) -> web.StreamResponse:
    """cut: after how many chunks the connection is lost."""
    response = await _streaming(request)
    for number, chunk in enumerate(chunks):
        if number == cut:
            assert request.transport is not None
            request.transport.abort()
            return response
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


async def _streaming(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    return response


class Server(Protocol):
    """Listens at `url` once it is served; port: 0 picks a free one."""

    url: str
    port: int

    def app(self) -> web.Application: ...


Served = TypeVar("Served", bound=Server)


@contextmanager
def serving(engine: Served) -> Iterator[Served]:
    """The engine in a thread of this process."""
    loop, ready = asyncio.new_event_loop(), threading.Event()

    async def serve() -> AsyncIterator[None]:
        runner = web.AppRunner(engine.app(), handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", engine.port, reuse_address=True).start()
        engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield
        await runner.cleanup()

    life = serve()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(anext(life))
        ready.set()
        loop.run_forever()
        loop.run_until_complete(anext(life, None))
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    try:
        yield engine
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
