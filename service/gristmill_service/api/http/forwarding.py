"""Passes a request on to the process that decides for its run, and that process' answer back, as they are.

A request is passed on once: where it arrives at the wrong process again, its caller is told to retry.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from gristmill.errors import UnavailableError
from gristmill_service.api.errors import refusal
from gristmill_service.api.http.bodies import BODY
from gristmill_service.api.waiting import LONGEST_WAIT_S
from gristmill_service.store.ledger import OwnedElsewhereError

_MARK = "gristmill-forwarded"
_DROPPED = frozenset(
    {"host", "content-length", "content-encoding", "transfer-encoding", "connection", "date", "server"}
)


class Forwarding:
    def __init__(self) -> None:
        timeout = httpx.Timeout(LONGEST_WAIT_S + 10, connect=2.0)
        self._client = httpx.AsyncClient(timeout=timeout, trust_env=False, limits=httpx.Limits(max_connections=None))

    async def answer(self, request: Request, error: Exception) -> Response:
        """The exception handler of OwnedElsewhereError."""
        assert isinstance(error, OwnedElsewhereError)
        if _MARK in request.headers:
            return _unavailable(f"{error}; its owner is changing")
        headers = {name: value for name, value in request.headers.items() if name not in _DROPPED} | {_MARK: "1"}
        url = f"{error.http_url}{request.scope['raw_path'].decode('ascii')}"
        query = request.scope["query_string"].decode("latin-1")
        passed_on = self._client.build_request(
            request.method, f"{url}?{query}" if query else url, headers=headers, content=request.scope.get(BODY, b"")
        )
        try:
            found = await self._client.send(passed_on, stream=True)
        except httpx.HTTPError as failure:
            return _unavailable(f"the process that decides for this run does not answer: {failure!r}; retry")
        kept = {name: value for name, value in found.headers.items() if name not in _DROPPED}
        return StreamingResponse(_pieces(found), found.status_code, kept)

    async def close(self) -> None:
        await self._client.aclose()


async def _pieces(found: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in found.aiter_raw():
            yield piece
    finally:
        await found.aclose()


def _unavailable(message: str) -> JSONResponse:
    told = refusal(UnavailableError(message))
    return JSONResponse(told.body, told.http_status, told.headers)
