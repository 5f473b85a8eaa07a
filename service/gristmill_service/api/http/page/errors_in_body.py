"""Refusals for the page, in the body of an answer with status 200.

A browser writes every answer of 400 and above to its console as an error, whatever the page makes of it. The page
expects some, as when somebody deletes the run that it shows, so it asks for them in this form (`Prefer`, RFC 7240).
"""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

STATUS = "gristmill-status"
"""The header that has the status which the answer would have had."""

_PREFERENCE = "errors=body"


class ErrorsInBody:
    """ASGI middleware for callers that send `Prefer: errors=body`; the answers of all others stay as they are."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                headers = {STATUS: str(message["status"]), "preference-applied": _PREFERENCE}
                MutableHeaders(scope=message).update(headers)
                message["status"] = 200
            await send(message)

        wants_it = scope["type"] == "http" and Headers(scope=scope).get("prefer") == _PREFERENCE
        await self._app(scope, receive, sent if wants_it else send)
