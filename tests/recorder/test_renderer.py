"""Conversations are rendered by the best route that the engine has."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

from gristmill_recorder.engines.connection import Engine
from gristmill_recorder.engines.renderer import Renderer
from gristmill_recorder.engines.vllm import VLLM

RENDER, TOKENIZE = "v1/chat/completions/render", "tokenize"


class Routes:
    """An engine that serves one model. routes: those that it has. asked: the calls so far."""

    def __init__(self, *routes: str) -> None:
        self._routes, self.asked = routes, list[str]()

    async def ask(
        self, method: str, path: str, headers: Mapping[str, str], body: Mapping[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        self.asked.append(path)
        if path not in self._routes or body["model"] != "toy":
            return 404, {"error": {"message": "not found"}}
        return 200, {"token_ids": [1]} if path == RENDER else {"tokens": [2]}


def rendered(renderer: Renderer, model: str = "toy") -> list[list[int]] | None:
    return asyncio.run(renderer.render({"model": model}, [[{"role": "user", "content": "hi"}]], {}))


def renderer_of(routes: Routes) -> Renderer:
    return Renderer(cast(Engine, routes), VLLM)


def test_a_route_that_the_engine_does_not_have_is_asked_once() -> None:
    routes = Routes(TOKENIZE)
    renderer = renderer_of(routes)
    assert [rendered(renderer) for _ in range(2)] == [[[2]], [[2]]]
    assert routes.asked == [RENDER, TOKENIZE, TOKENIZE]


def test_a_model_that_the_engine_does_not_serve_leaves_the_route_to_others() -> None:
    routes = Routes(RENDER, TOKENIZE)
    renderer = renderer_of(routes)
    assert rendered(renderer, "typo") is None
    assert rendered(renderer) == [[1]]
    assert routes.asked == [RENDER, TOKENIZE, RENDER]
