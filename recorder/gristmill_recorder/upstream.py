"""The connection to the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from gristmill_recorder.names import HEADER
from gristmill_recorder.refusals import EngineAway, EngineSlow
from gristmill_recorder.settings import RecorderSettings

# Engines close a connection that is idle for 5 s, uvicorn's default: one that is about to be closed is not used.
_KEEPALIVE_S = 3.0
# RFC 9110, 7.6.1: of one connection alone. The body's length and encoding are those of what is sent.
_OF_CONNECTION = frozenset(
    (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer"),
        *("transfer-encoding", "upgrade", "content-length", "content-encoding"),
    )
)
_OF_REQUEST = _OF_CONNECTION | {"host", "accept-encoding", "expect"}


class Upstream:
    """Calls the engine, each once: an agent's library tries again by itself, and sees the engine's own errors."""

    def __init__(self, settings: RecorderSettings) -> None:
        self._base = settings.upstream
        self._silence_s = settings.silence_timeout_s
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=settings.connect_timeout_s, sock_read=settings.silence_timeout_s
        )
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("user-agent", "content-type", "accept"),
            read_bufsize=1 << 18,
        )

    @asynccontextmanager
    async def calling(
        self, method: str, path: str, query: str, headers: Mapping[str, str], body: bytes | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The engine's answer, whose body is read within the block. Ends the call with the block, also halfway.

        Raises EngineAway and EngineSlow, also for what is read within the block.
        """
        url = URL(f"{self._base}/{path}?{query}" if query else f"{self._base}/{path}", encoded=True)
        sent = CIMultiDict(headers)
        sent["accept-encoding"] = "identity"
        try:
            async with self._session.request(method, url, headers=sent, data=body, allow_redirects=False) as answer:
                yield answer
        except TimeoutError:
            raise EngineSlow(
                f"the engine at {self._base} did not answer, or was silent for {self._silence_s:g} s; see whether it "
                "is overloaded, or raise --silence-timeout-s"
            ) from None
        except aiohttp.ClientError as error:
            raise EngineAway(f"the engine at {self._base} cannot be reached: {error}; see whether it runs") from None

    async def close(self) -> None:
        await self._session.close()


def request_headers(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """What goes on to the engine of an agent's headers: its key too."""
    return CIMultiDict(
        (name, value)
        for name, value in headers.items()
        if (lower := name.lower()) not in _OF_REQUEST and not lower.startswith(HEADER)
    )


def answer_headers(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """What goes on to the agent of the engine's headers."""
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _OF_CONNECTION)
