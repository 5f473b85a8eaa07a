"""Forwards a request to the process that owns its run, and returns that process's answer unchanged.

A request is forwarded only once. If it reaches a process that does not own the run again, the caller must retry.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from gristmill.errors import UnavailableError
from gristmill_service import tracing
from gristmill_service.access import passed_on
from gristmill_service.access.certificates import PeerCertificates
from gristmill_service.api.errors import error_response
from gristmill_service.api.http.guards.admitted import address_of
from gristmill_service.api.http.guards.bodies import BODY
from gristmill_service.api.long_poll import LONGEST_WAIT_S
from gristmill_service.off_loop import ignore_error
from gristmill_service.storage.run_store import OwnedElsewhereError

_LOOK_S = 0.5
# Headers that each process sets itself. Without `prefer`, the owner sends an error with its HTTP status.
_DROPPED = frozenset(
    {"host", "content-length", "content-encoding", "transfer-encoding", "connection", "date", "server", "prefer"}
)
# Additionally, headers that only a peer may set, and headers about this process's host name.
_MINE = _DROPPED | {passed_on.MARK, passed_on.CAME_FROM, tracing.REQUEST_ID, "origin", "sec-fetch-site"}


class Forwarding:
    """Connections to the processes that own other runs.

    is_owner(run, grpc address): whether that process still owns the run, according to this process. peers: certificates
        for connections to other processes; None: not encrypted.
    """

    def __init__(self, is_owner: Callable[[str, str], Awaitable[bool]], peers: PeerCertificates | None) -> None:
        self._is_owner, self._peers = is_owner, peers
        timeout = httpx.Timeout(LONGEST_WAIT_S + 10, connect=2.0)
        tls = True if peers is None else peers.context()
        self._client = httpx.AsyncClient(
            timeout=timeout, trust_env=False, limits=httpx.Limits(max_connections=None), verify=tls
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def answer(self, request: Request, error: Exception) -> Response:
        """Forwards the request. Called as the exception handler of OwnedElsewhereError."""
        assert isinstance(error, OwnedElsewhereError)
        if passed_on.current():
            return _unavailable(f"{error}; the run is moving to another replica")
        if self._peers is not None:
            # Reloads the certificates if they changed. The context stays the same object.
            self._peers.context()
        sending = asyncio.ensure_future(self._client.send(self._request(request, error), stream=True))
        ignore_error(sending)
        try:
            while not (await asyncio.wait([sending], timeout=_LOOK_S))[0]:
                if not await self._is_owner(error.run, error.grpc_address) and not sending.done():
                    return _unavailable(f"{error}; the owner changed during the call")
            answer = sending.result()
        except httpx.HTTPError as failure:
            return _unavailable(f"the process that owns this run does not answer: {failure!r}; retry")
        finally:
            sending.cancel()
        headers = {name: value for name, value in answer.headers.items() if name not in _DROPPED}
        return StreamingResponse(_pieces(answer), answer.status_code, headers)

    def _request(self, request: Request, error: OwnedElsewhereError) -> httpx.Request:
        url = f"{error.http_url}{request.scope['raw_path'].decode('ascii')}"
        query = request.scope["query_string"].decode("latin-1")
        return self._client.build_request(
            request.method,
            f"{url}?{query}" if query else url,
            headers=_headers(request, error.secret),
            content=bytes(request.scope.get(BODY, b"")),
        )


def _headers(request: Request, secret: str) -> list[tuple[bytes, bytes]]:
    """Returns the caller's headers unchanged, including repeated headers, so that the owner reads the same values."""
    added = {
        passed_on.MARK: secret,
        passed_on.CAME_FROM: address_of(request.scope),
        tracing.REQUEST_ID: tracing.request_id(),
        **tracing.carried(),
    }
    kept = [(name, value) for name, value in request.headers.raw if name.decode("latin-1") not in {*_MINE, *added}]
    return [*kept, *((name.encode(), value.encode()) for name, value in added.items())]


async def _pieces(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in answer.aiter_raw():
            yield piece
    finally:
        await answer.aclose()


def _unavailable(message: str) -> Response:
    return error_response(UnavailableError(message))
