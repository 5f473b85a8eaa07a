"""A real SGLang whose model says what is scripted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
from aiohttp import web

from tests.engines.rollout import MODEL
from tests.engines.sglang.script import Script
from tests.engines.templates.engine import ScriptedEngine, mark_of
from tests.engines.witness import passed_on

_LINE = 1 << 24


@dataclass
class ScriptedSglang(ScriptedEngine):
    """A proxy in front of the SGLang at `upstream`, which tells it the tokens to sample."""

    api: ClassVar[str] = "sglang"
    has_model: ClassVar[bool] = True

    upstream: str = ""
    given: dict[str, list[float]] = field(default_factory=dict)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=_LINE)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/{path:.*}", self._pass_on)
        return app

    def logprobs(self, mark: str) -> list[float]:
        return self.given[mark]

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        mark = mark_of(body)
        asked = {**body, "model": MODEL, **(self._script(mark) if mark in self.scripts else {})}
        note = partial(self._note, mark, body, list[float]())
        return await passed_on(request, self.upstream, asked, note)

    def _script(self, mark: str) -> dict[str, Any]:
        """Returns fields by which SGLang says the answer, and no more."""
        answer = self.scripts[mark]
        ends = [self.family.encode(end)[0] for end in self.family.ends]
        more: dict[str, Any] = {"max_tokens": len(answer.tokens), "stop_token_ids": ends, "temperature": 0}
        return {**more, "custom_logit_processor": Script.to_str(), "custom_params": {"script": answer.tokens}}

    def _note(self, mark: str, body: Mapping[str, Any], logprobs: list[float], document: Mapping[str, Any]) -> None:
        for choice in document.get("choices", ()):
            logprobs += [token["logprob"] for token in (choice.get("logprobs") or {}).get("content") or ()]
        if (extension := document.get("sglext")) and mark:
            self.asked[mark] = extension["input_ids"], body
            self.given[mark] = np.array(logprobs, np.float32).tolist()
