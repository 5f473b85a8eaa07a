"""A proxy between a recorder and an engine, which notes what the engine itself answered."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientSession, web

_LINE = 1 << 24


async def passed_on(
    request: web.Request, upstream: str, body: dict[str, Any], note: Callable[[dict[str, Any]], None]
) -> web.StreamResponse:
    """Sends the body to the engine, and its answer to who asked. note: gets the answer, or each event of a stream."""
    async with (
        ClientSession(read_bufsize=_LINE) as session,
        session.post(f"{upstream}{request.path}", json=body) as answer,
    ):
        headers = {"content-type": answer.headers["content-type"]}
        response = web.StreamResponse(status=answer.status, headers=headers)
        await response.prepare(request)
        # An event of a stream is a line, and a whole answer is one.
        async for line in answer.content:
            if (data := line.removeprefix(b"data: ")).startswith(b"{"):
                note(json.loads(data))
            await response.write(line)
    return response


@dataclass
class Answer:
    """A choice, with the engine's own token ids and logprobs. request: the call that it answers."""

    request: dict[str, Any]
    prompt: list[int] = field(default_factory=list)
    response: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Witness:
    """Listens at `url`, in front of the engine at `upstream`. answers: the choices of all calls."""

    upstream: str
    url: str = ""
    port: int = 0
    answers: list[Answer] = field(default_factory=list)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=_LINE)
        app.router.add_post("/{path:.*}", self._pass_on)
        return app

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        asked, choices = await request.json(), dict[int, Answer]()
        return await passed_on(request, self.upstream, asked, lambda document: self._note(asked, document, choices))

    def _note(self, asked: dict[str, Any], document: dict[str, Any], choices: dict[int, Answer]) -> None:
        for choice in document.get("choices", ()):
            if (answer := choices.get(choice["index"])) is None:
                answer = choices[choice["index"]] = Answer(asked)
                self.answers.append(answer)
            prompt = document.get("prompt_token_ids") or choice.get("prompt_token_ids")
            # Of vLLM's own route only the first choice of a stream has the prompt.
            answer.prompt = answer.prompt or prompt or choices[min(choices)].prompt
            answer.response += choice.get("token_ids") or []
            logprobs = choice.get("logprobs") or {}
            answer.logprobs += [token["logprob"] for token in logprobs.get("content") or ()]
            answer.logprobs += logprobs.get("token_logprobs") or []
        # SGLang: of chat completions, and of its own route, each of whose events has all tokens so far.
        extension = document.get("sglext") or {}
        for index, response in enumerate(extension.get("output_ids") or ()):
            choices[index].prompt, choices[index].response = extension["input_ids"], response
        if "meta_info" in document:
            if not choices:
                choices[0] = Answer(asked, asked["input_ids"])
                self.answers.append(choices[0])
            choices[0].response = document["output_ids"]
            choices[0].logprobs = [logprob for logprob, *_ in document["meta_info"]["output_token_logprobs"]]
