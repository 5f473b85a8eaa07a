"""A llama-server of tests, over real HTTP: `/completion` in the form of llama.cpp's `tools/server`, b11434.

What it omits was seen with a real one and a tiny model, and is that of `process_token` and `send_final_response` in
`server-context.cpp`: a stream lacks the tokens that end within a character, and every answer their logprobs; an answer
that is not streamed lacks the logprobs of a stop string's tokens; drafted tokens have no candidates.

A token is a byte. The end of the prompt says what is answered: `say WORDS`, `fail` (an error in a stream, after its
first event), `cut` (the connection is lost there), `none` (no token).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from aiohttp import web

from tests.recorder.engine import END, tokens_of

SETTINGS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "logit_bias": [], "grammar": ""}


def prob_of(place: int) -> float:
    """Of the token at this place of an answer."""
    return 1 / (place % 7 + 1)


@dataclass
class LlamaServer:
    """One that listens at `url`.

    settings: its defaults. drafts: places of drafted tokens. reads: how many tokens of the prompt it reads. context:
    how many tokens it can store. shifts: whether it drops tokens instead of an end there, as with --context-shift.
    prob: of all tokens. has_tokens: whether it knows `return_tokens`.
    """

    settings: dict[str, Any] = field(default_factory=lambda: dict(SETTINGS))
    drafts: tuple[int, ...] = ()
    reads: int | None = None
    context: int = 1 << 20
    shifts: bool = False
    prob: float | None = None
    has_tokens: bool = True
    port: int = 0
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/completion", self._completion)
        app.router.add_post("/completions", self._completion)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "toy", "object": "model", "owned_by": "llamacpp"}]})

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        if any(token > END for token in body["prompt"]):
            error = {"code": 400, "message": "Prompt contains invalid tokens", "type": "invalid_request_error"}
            return web.json_response({"error": error}, status=400)
        answer = _Answer(self, body)
        if not body.get("stream"):
            return web.json_response(answer.whole())
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        events = [*answer.events()]
        if answer.script == "fail":
            events[1:] = [{"error": {"code": 500, "message": "it broke", "type": "server_error"}}]
        for event in events:
            # Unlike its chat completions, it does not end with [DONE].
            await response.write(b"data: " + web.json_response(event).body + b"\n\n")  # type: ignore[operator]
            if answer.script == "cut":
                assert request.transport is not None
                request.transport.abort()
                break
        return response


class _Answer:
    def __init__(self, server: LlamaServer, body: dict[str, Any]) -> None:
        self._server, self._body = server, body
        prompt = body["prompt"]
        last = [*prompt[::-1], END].index(END)
        self.script = bytes(prompt[len(prompt) - last :]).decode()
        self._tokens = [] if self.script == "none" else [*tokens_of(self.script.removeprefix("say ")), END]
        self._stop = next((word for word in body.get("stop") or () if word in self.script), "")
        if self._stop:
            text = bytes(self._tokens[:-1])
            self._tokens = self._tokens[: text.index(self._stop.encode()) + len(self._stop.encode())]
        room = server.context - len(body["prompt"])
        self._is_full = len(self._tokens) > room
        if not server.shifts:
            self._tokens = self._tokens[:room]

    def whole(self) -> dict[str, Any]:
        tokens = self._tokens if self._body.get("return_tokens") and self._server.has_tokens else []
        answer = self._final() | {"content": self.script.removeprefix("say "), "tokens": tokens}
        shown = [place for place in range(len(self._tokens)) if self._ends_character(place)]
        shown = shown[: len(shown) - len(tokens_of(self._stop))]
        return answer | (self._probabilities(shown) if shown else {})

    def events(self) -> Iterator[dict[str, Any]]:
        base: dict[str, Any] = {"index": 0, "stop": False, "id_slot": -1, "tokens_evaluated": self._read}
        if self._body.get("return_progress"):
            yield {
                **base,
                "content": "",
                "tokens": [0],
                "tokens_predicted": 0,
                "prompt_progress": {"total": self._read},
            }
        ends = [-1, *(place for place in range(len(self._tokens)) if self._ends_character(place))]
        for before, place in pairwise(ends):
            content = bytes(token for token in self._tokens[before + 1 : place + 1] if token != END).decode()
            event = {**base, "content": content, "tokens": [self._tokens[place]], "tokens_predicted": place + 1}
            yield event | ({} if place in self._server.drafts else self._probabilities([place]))
        yield self._final() | {"content": "", "tokens": []}

    @property
    def _read(self) -> int:
        return len(self._body["prompt"]) if self._server.reads is None else self._server.reads

    def _final(self) -> dict[str, Any]:
        cached = self._read + len(self._tokens) - 1
        asked = {"n_probs": self._body.get("n_probs", 0), "post_sampling_probs": False}
        settings = {**self._server.settings, **asked}
        if "post_sampling_probs" in self._body:
            settings["post_sampling_probs"] = self._body["post_sampling_probs"]
        answer = {"index": 0, "id_slot": 0, "stop": True, "model": "toy", "generation_settings": settings}
        answer |= {"tokens_predicted": len(self._tokens), "tokens_evaluated": self._read, "truncated": self._is_full}
        answer["stop_type"] = "word" if self._stop else "limit" if self._is_full else "eos"
        answer["tokens_cached"] = cached // 2 if self._is_full and self._server.shifts else cached
        return answer

    def _ends_character(self, place: int) -> bool:
        try:
            bytes(token for token in self._tokens[: place + 1] if token != END).decode()
        except UnicodeDecodeError:
            return False
        return True

    def _probabilities(self, places: list[int]) -> dict[str, Any]:
        if not self._body.get("n_probs"):
            return {}
        is_post = self._body.get("post_sampling_probs")
        value, candidates = ("prob", "top_probs") if is_post else ("logprob", "top_logprobs")
        entries = []
        for place in places:
            prob = prob_of(place) if self._server.prob is None else self._server.prob
            number = prob if is_post else -place / 8 if prob else -3.4028234663852886e38
            is_drafted = place in self._server.drafts
            entries.append(
                {"id": self._tokens[place], value: number, candidates: [] if is_drafted else [{"id": 1, value: number}]}
            )
        return {"completion_probabilities": entries}
