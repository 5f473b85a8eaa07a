"""The calls of the engine, and the connections that they leave for the next."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from aiohttp.web import BaseRequest
from multidict import CIMultiDict, CIMultiDictProxy

from gristmill_recorder.connection import BrokenAnswerError, Connection
from gristmill_recorder.names import HEADER
from gristmill_recorder.refusals import EngineAway, EngineSlow
from gristmill_recorder.settings import RecorderSettings

# Engines close a connection that is idle for 5 s, uvicorn's default: one that is about to be closed is not used.
_KEEPALIVE_S = 3.0
# RFC 9110, 7.6.1: of one connection alone. The body's length is that of what is sent.
_OF_CONNECTION = frozenset(
    (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer"),
        *("transfer-encoding", "upgrade", "content-length"),
    )
)
_OF_REQUEST = _OF_CONNECTION | {"host", "accept-encoding", "content-encoding", "expect"}


class Answer:
    """The engine's, whose head is here and whose body comes."""

    def __init__(self, connection: Connection, silence_s: float) -> None:
        self.status, self.headers = connection.status, connection.headers
        self._connection, self._silence_s = connection, silence_s

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    def parts(self) -> AsyncIterator[bytes]:
        return self._connection.parts(self._silence_s)

    async def read(self) -> bytes:
        return b"".join([part async for part in self.parts()])


class Upstream:
    """Calls the engine, each once: an agent's library tries again by itself, and sees the engine's own errors."""

    def __init__(self, settings: RecorderSettings) -> None:
        self._base = settings.upstream
        self._connect_s, self._silence_s = settings.connect_timeout_s, settings.silence_timeout_s
        where = urlsplit(self._base)
        self._host, self._prefix = where.hostname or "", where.path
        self._port = where.port or (443 if where.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if where.scheme == "https" else None
        self._own = f"host: {where.netloc.rpartition('@')[2]}\r\naccept-encoding: identity\r\n"
        self._idle = deque[Connection]()

    @asynccontextmanager
    async def calling(
        self, method: str, path: str, query: str, headers: Mapping[str, str], body: bytes | None
    ) -> AsyncIterator[Answer]:
        """The engine's answer, whose body is read within the block. Ends the call with the block, also halfway.

        Raises EngineAway and EngineSlow, also for what is read within the block.
        """
        request = self._request(method, f"{path}?{query}" if query else path, headers, body)
        connection = None
        try:
            connection = self._kept() or await Connection.opened(self._host, self._port, self._tls, self._connect_s)
            await connection.begin(request, self._silence_s)
            yield Answer(connection, self._silence_s)
        except TimeoutError:
            raise EngineSlow(
                f"the engine at {self._base} did not answer, or was silent for {self._silence_s:g} s; see whether it "
                "is overloaded, or raise --silence-timeout-s"
            ) from None
        except BrokenAnswerError as error:
            raise EngineAway(f"the engine at {self._base} cannot be reached: {error}; see whether it runs") from None
        finally:
            if connection is not None:
                self._keep(connection)

    async def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _request(self, method: str, target: str, headers: Mapping[str, str], body: bytes | None) -> bytes:
        lines = [f"{method} {self._prefix}/{target} HTTP/1.1\r\n{self._own}"]
        lines += [f"{name}: {value}\r\n" for name, value in headers.items()]
        if body is not None:
            lines.append(f"content-length: {len(body)}\r\n")
        return "".join([*lines, "\r\n"]).encode("utf-8", "surrogateescape") + (body or b"")

    def _kept(self) -> Connection | None:
        """The connection that was used last, if it may be used again. The others are as old or older."""
        fresh = asyncio.get_running_loop().time() - _KEEPALIVE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable and connection.idle_since > fresh:
                return connection
            connection.close()
        return None

    def _keep(self, connection: Connection) -> None:
        if connection.is_reusable:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.close()


def query_of(request: BaseRequest) -> str:
    """A call's query as the agent wrote it: decoded it might end the line that the engine reads."""
    return request.raw_path.partition("?")[2]


def request_headers(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """What goes on to the engine of an agent's headers: its key too."""
    return CIMultiDict(
        (name, value)
        for name, value in headers.items()
        if (lower := name.lower()) not in _OF_REQUEST and not lower.startswith(HEADER)
    )


def answer_headers(headers: CIMultiDict[str]) -> CIMultiDict[str]:
    """What goes on to the agent of the engine's headers."""
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _OF_CONNECTION)
