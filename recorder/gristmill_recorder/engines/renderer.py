"""Asks the engine to render conversations."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from gristmill._engines.fields import Document
from gristmill_recorder.engines.api import EngineApi
from gristmill_recorder.engines.connection import Engine
from gristmill_recorder.refusals import EngineAway, EngineSlow

# Of a route that the engine does not have, and of a model.
_UNKNOWN = (403, 404, 405)
# An agent waits for it: then the call is sent as it came.
_MAX_S = 30.0


_log = logging.getLogger("gristmill.recorder")


class Renderer:
    """Renders by the first route that the engine has. One is known to be missing once a later one renders the same."""

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
        for place, route in enumerate(routes := self._routes):
            try:
                async with asyncio.timeout(_MAX_S):
                    status, answer = await self._engine.ask("POST", route.path, headers, route.body(request))
            except (EngineAway, EngineSlow, TimeoutError, TypeError):
                # A body that is nested too deeply has no JSON: the call itself says so.
                return None
            if status not in _UNKNOWN:
                tokens = answer.get(route.tokens)
                if not isinstance(tokens, list) or {*map(type, tokens)} != {int}:
                    return None
                if place and self._routes is routes:
                    _log.info("engine has no /%s, conversations are rendered by /%s", routes[0].path, route.path)
                    self._routes = routes[place:]
                return tokens
        return None
