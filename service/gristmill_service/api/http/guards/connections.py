"""HTTP connections: bounded in number, and closed where nothing comes over them."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_S = 20.0
"""Within which a connection's next request has to begin and its headers to be whole, the first time; uvicorn closes
those that are kept for another request sooner."""


def connections(most: int) -> type[H11Protocol]:
    """The protocol of a server that has at most so many."""

    class Connection(H11Protocol):
        """Where there are too many, the one that has waited longest for its caller is closed; where none waits, the new
        one."""

        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._watch()
            if len(self.connections) > most:
                waiting = (one for one in self.connections if isinstance(one, Connection) and one.waits_since())
                longest = min(waiting, key=Connection.waits_since, default=self)
                longest.transport.abort()
                self.connections.discard(longest)

        def waits_since(self) -> float:
            """When its time ends: the sooner, the longer it has waited. 0 while a request is answered."""
            return 0.0 if self._deadline is None else self._deadline.when()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unwatch()
            super().connection_lost(exc)

        def _watch(self) -> None:
            if self.conn.their_state is not h11.IDLE:
                self._unwatch()
            elif self._deadline is None:
                self._deadline = self.loop.call_later(REQUEST_S, self.transport.abort)

        def _unwatch(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return Connection
