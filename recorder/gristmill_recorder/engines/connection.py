"""Calls the engine over HTTP, and streams its answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import orjson
from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, DummyCookieJar, TCPConnector
from aiohttp.web import BaseRequest
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from gristmill_recorder.names import HEADER
from gristmill_recorder.refusals import EngineAway, EngineSlow
from gristmill_recorder.settings import RecorderSettings

# Engines close connections that are idle for 5 s, uvicorn's default. Do not reuse a connection about to be closed.
_KEEPALIVE_S = 3.0
_MAX_HEADER_BYTES = 64 << 10
# Hop-by-hop headers (RFC 9110, 7.6.1), and content-length, which is set again for the forwarded body.
_HOP_BY_HOP = frozenset(
    (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer"),
        *("transfer-encoding", "upgrade", "content-length"),
    )
)
_NOT_FORWARDED = _HOP_BY_HOP | {
    *("host", "accept-encoding", "content-encoding", "expect"),
    # The recorder decides which web pages may call, and read answers.
    *("origin", "sec-fetch-site"),
}
_SHARED = frozenset(f"access-control-{name}" for name in ("allow-origin", "allow-credentials", "expose-headers"))


class Engine:
    """Sends calls to the engine, each once: the agent's client retries, and receives the engine's own errors."""

    def __init__(self, settings: RecorderSettings) -> None:
        self._url, self._silence_s = settings.upstream, settings.silence_timeout_s
        self._session = ClientSession(
            connector=TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=ClientTimeout(connect=settings.connect_timeout_s, sock_read=self._silence_s),
            cookie_jar=DummyCookieJar(),
            skip_auto_headers=("accept", "content-type", "user-agent"),
            headers={"accept-encoding": "identity"},
            auto_decompress=False,
            max_line_size=_MAX_HEADER_BYTES,
            max_field_size=_MAX_HEADER_BYTES,
        )

    @asynccontextmanager
    async def call(
        self, method: str, path: str, query: str, headers: MutableMapping[str, str], body: bytes | None
    ) -> AsyncIterator[ClientResponse]:
        """Sends a call and yields the engine's answer. Read its body within the block; leaving the block earlier
        cancels the call.

        path, query: as the agent sent them, still escaped. Raises EngineAway and EngineSlow, also while the body is
        read.
        """
        url = URL(f"{self._url}/{path}{'?' if query else ''}{query}", encoded=True)
        try:
            async with self._session.request(method, url, headers=headers, data=body, allow_redirects=False) as answer:
                yield answer
        except TimeoutError:
            raise EngineSlow(
                f"the engine at {self._url} did not accept the connection, or sent nothing for {self._silence_s:g} s; "
                "check whether it is overloaded, or raise --connect-timeout-s or --silence-timeout-s"
            ) from None
        except (ClientError, ConnectionError) as error:
            raise EngineAway(
                f"the engine at {self._url} cannot be reached: {error}; check that it runs, and check --upstream"
            ) from None

    async def ask(
        self, method: str, path: str, headers: Mapping[str, str], body: Mapping[str, Any] | None
    ) -> tuple[int, dict[str, Any]]:
        """Makes a call of the recorder's own. Returns the status, and the answer if it is a JSON object, else {}.
        Raises EngineAway and EngineSlow."""
        encoded = None if body is None else orjson.dumps(body)
        async with self.call(method, path, "", CIMultiDict(headers), encoded) as answer:
            try:
                document = orjson.loads(await answer.read())
            except orjson.JSONDecodeError:
                document = {}
            return answer.status, document if isinstance(document, dict) else {}

    async def close(self) -> None:
        await self._session.close()


def query_of(request: BaseRequest) -> str:
    """Returns a call's query, still escaped: decoded, it could contain a line break and inject a header."""
    return request.raw_path.partition("?")[2]


def request_headers(request: BaseRequest) -> MutableMapping[str, str]:
    """Returns the headers of an agent's call that are forwarded to the engine, including its key."""
    headers = _without(request.headers, _NOT_FORWARDED)
    for name in {name for name in headers if name.lower().startswith(HEADER)}:
        headers.popall(name, None)
    return headers


def answer_headers(answer: ClientResponse) -> MutableMapping[str, str]:
    """Returns the headers of an engine's answer that are forwarded to the agent."""
    return _without(answer.headers, _HOP_BY_HOP | _SHARED)


def _without(headers: CIMultiDictProxy[str], names: frozenset[str]) -> CIMultiDict[str]:
    """Returns the headers without `names`, and without the hop-by-hop headers that `Connection` lists."""
    listed = {name.strip().lower() for value in headers.getall("connection", ()) for name in value.split(",")}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in names | listed)
