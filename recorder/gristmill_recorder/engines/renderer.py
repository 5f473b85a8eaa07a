"""Asks the engine to render conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import orjson
from multidict import CIMultiDict

from gristmill._engines.fields import Document
from gristmill_recorder.engines.api import EngineApi
from gristmill_recorder.engines.connection import Engine
from gristmill_recorder.refusals import RefusalError

_UNKNOWN_ROUTE = (403, 404, 405)


class Renderer:
    """Renders by the first route that the engine has."""

    def __init__(self, engine: Engine, api: EngineApi) -> None:
        self._engine = engine
        self._routes = [*api.renderings]

    async def render(
        self, request: Document, conversations: Sequence[list[Document]], headers: Mapping[str, str]
    ) -> list[list[int]] | None:
        """Returns the prompts of the request with these messages; None if the engine does not render one of them."""
        asked = (self._render({**request, "messages": messages}, headers) for messages in conversations)
        prompts = await asyncio.gather(*asked)
        rendered = [prompt for prompt in prompts if prompt]
        return rendered if len(rendered) == len(prompts) else None

    async def _render(self, request: Document, headers: Mapping[str, str]) -> list[int] | None:
        while True:
            route, *others = self._routes
            status, answer = await self._post(route.path, route.body(request), headers)
            if status not in _UNKNOWN_ROUTE or not others:
                return answer.get(route.tokens)
            if self._routes[0] == route:
                self._routes = others

    async def _post(self, path: str, body: Document, headers: Mapping[str, str]) -> tuple[int, Document]:
        """Returns the status and the answer; an empty one if the engine cannot be reached."""
        try:
            async with self._engine.call("POST", path, "", CIMultiDict(headers), orjson.dumps(body)) as answer:
                document = orjson.loads(await answer.read()) if answer.status == 200 else {}
                return answer.status, document if isinstance(document, dict) else {}
        except (RefusalError, orjson.JSONDecodeError, TypeError):
            return 0, {}
