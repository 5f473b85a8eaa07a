"""Passes a request on to the process that decides for its run, and that process' answer back, as they are.

A request is passed on once: where it arrives at the wrong process again, its caller is told to retry.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import httpx
from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool

from gristmill.errors import UnavailableError
from gristmill_service import tracing
from gristmill_service.access import passed_on
from gristmill_service.access.certificates import PeerCertificates
from gristmill_service.api import request_ids
from gristmill_service.api.errors import refusal
from gristmill_service.api.http.guards.bodies import BODY
from gristmill_service.api.long_poll import LONGEST_WAIT_S
from gristmill_service.call_threads import waiting
from gristmill_service.storage.run_store import OwnedElsewhereError

_LOOK_S = 0.5
# Of these each process sends its own; a refusal comes with its status, whatever the caller prefers.
_DROPPED = frozenset(
    {"host", "content-length", "content-encoding", "transfer-encoding", "connection", "date", "server", "prefer"}
)
# And what a peer alone may say, and what was looked at here: it is about this process' own host name.
_MINE = _DROPPED | {passed_on.MARK, passed_on.CAME_FROM, request_ids.HEADER, "origin", "sec-fetch-site"}


class Forwarding:
    """is_owner(run, grpc address): whether the run is still decided there, as far as is known here. peers: certificates
    of connections to other processes; None: they are not encrypted."""

    def __init__(self, is_owner: Callable[[str, str], bool], peers: PeerCertificates | None) -> None:
        self._is_owner, self._peers = is_owner, peers
        timeout = httpx.Timeout(LONGEST_WAIT_S + 10, connect=2.0)
        tls = True if peers is None else peers.context()
        self._client = httpx.AsyncClient(
            timeout=timeout, trust_env=False, limits=httpx.Limits(max_connections=None), verify=tls
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def answer(self, request: Request, error: Exception) -> Response:
        """The exception handler of OwnedElsewhereError."""
        assert isinstance(error, OwnedElsewhereError)
        if passed_on.current():
            return _unavailable(f"{error}; its owner is changing")
        url = f"{error.http_url}{request.scope['raw_path'].decode('ascii')}"
        query = request.scope["query_string"].decode("latin-1")
        asking = self._client.build_request(
            request.method,
            f"{url}?{query}" if query else url,
            headers=_headers(request, error.secret),
            content=request.scope.get(BODY, b""),
        )
        if self._peers is not None:
            # It is looked at for every request: the context is the same one.
            self._peers.context()
        sending = asyncio.ensure_future(self._client.send(asking, stream=True))
        try:
            while not await _done(sending):
                if not await run_in_threadpool(self._is_owner, error.run, error.grpc_address):
                    return _unavailable(f"{error}; its owner has changed")
            found = sending.result()
        except httpx.HTTPError as failure:
            return _unavailable(f"the process that decides for this run does not answer: {failure!r}; retry")
        finally:
            sending.cancel()
        kept = {name: value for name, value in found.headers.items() if name not in _DROPPED}
        return StreamingResponse(_pieces(found), found.status_code, kept)


def _headers(request: Request, secret: str) -> list[tuple[bytes, bytes]]:
    """The caller's own, byte for byte, also one that came twice: the owner reads them as this process did."""
    told = {
        passed_on.MARK: secret,
        passed_on.CAME_FROM: str((request.scope.get("client") or ("",))[0]),
        request_ids.HEADER: request_ids.current(),
        **tracing.carried(),
    }
    kept = [(name, value) for name, value in request.headers.raw if name.decode("latin-1") not in {*_MINE, *told}]
    return [*kept, *((name.encode(), value.encode()) for name, value in told.items())]


async def _done(sending: asyncio.Future[httpx.Response]) -> bool:
    with waiting():
        return bool((await asyncio.wait([sending], timeout=_LOOK_S))[0])


async def _pieces(found: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in found.aiter_raw():
            yield piece
    finally:
        await found.aclose()


def _unavailable(message: str) -> JSONResponse:
    told = refusal(UnavailableError(message))
    return JSONResponse(told.body, told.http_status, told.headers)
