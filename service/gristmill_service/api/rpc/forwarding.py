"""Forwards a call to the process that owns its run, and returns that process's answer unchanged.

A call is forwarded only once. If it reaches a process that does not own the run again, the caller must retry.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from gristmill.errors import UnavailableError
from gristmill_service import tracing
from gristmill_service.access import passed_on
from gristmill_service.access.gate import AUTHORIZATION
from gristmill_service.off_loop import ignore_error
from gristmill_service.storage.run_store import OwnedElsewhereError

_LONGEST_S = 60.0
_LOOK_S = 0.5

_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_retries", 0),
    # The address of a name changes when its pod is replaced; by default gRPC resolves names at most every 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # This is also the timeout of a connection attempt, by default 20 s: packets to a removed pod are dropped.
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Newer versions of gRPC read this instead of the option above.
    ("grpc.http2.ping_timeout_ms", 5_000),
)


class Forwarding:
    """Channels to the processes that own other runs.

    is_owner(run, address): whether that process still owns the run, according to this process. credentials(): for
        connections to other processes; new credentials after a renewal; None: not encrypted.
    """

    def __init__(
        self,
        is_owner: Callable[[str, str], Awaitable[bool]],
        credentials: Callable[[], grpc.ChannelCredentials] | None,
    ) -> None:
        self._is_owner, self._credentials = is_owner, credentials
        # Each channel with its credentials. Channels from before a renewal stay open until their calls end.
        self._channels: dict[str, tuple[grpc.ChannelCredentials | None, grpc.aio.Channel]] = {}
        self._renewed: list[grpc.aio.Channel] = []
        self._calls = Counter[grpc.aio.Channel]()

    async def unary(
        self, path: str, request: bytes | Iterator[bytes], owner: OwnedElsewhereError, context: Any
    ) -> bytes:
        """Returns the answer's bytes. Raises the owner's error as grpc.aio.AioRpcError, and UnavailableError if the
        process is no longer the owner: a process that lost the run may hang and never answer.

        request: its message, or all of its messages.
        """
        async with self._channel(owner) as channel:
            ask: Any = channel.unary_unary(path) if isinstance(request, bytes) else channel.stream_unary(path)
            call = ask(request, timeout=_left(context), metadata=_metadata(owner, context))
            answer: asyncio.Future[bytes] = asyncio.ensure_future(call)
            ignore_error(answer)
            try:
                while not (await asyncio.wait([answer], timeout=_LOOK_S))[0]:
                    if not await self._is_owner(owner.run, owner.grpc_address) and not answer.done():
                        raise UnavailableError(f"{owner}; the owner changed during the call")
                return await answer
            finally:
                call.cancel()

    async def stream(self, path: str, request: bytes, owner: OwnedElsewhereError, context: Any) -> AsyncIterator[bytes]:
        """Yields the bytes of the answers. Raises like `unary`."""
        async with self._channel(owner) as channel:
            call = channel.unary_stream(path)(request, timeout=_left(context), metadata=_metadata(owner, context))
            try:
                async for answer in call:
                    yield answer
            finally:
                call.cancel()

    async def close(self) -> None:
        for channel in (*self._renewed, *(channel for _, channel in self._channels.values())):
            await channel.close()

    @asynccontextmanager
    async def _channel(self, owner: OwnedElsewhereError) -> AsyncIterator[grpc.aio.Channel]:
        """Yields a channel to the run's owner for one call. Raises UnavailableError for a call that was already
        forwarded."""
        channel = self._open(owner)
        self._calls[channel] += 1
        try:
            yield channel
        finally:
            self._calls[channel] -= 1
            unused = [old for old in self._renewed if not self._calls[old]]
            for old in unused:
                self._renewed.remove(old)
                del self._calls[old]
            for old in unused:
                await old.close()

    def _open(self, owner: OwnedElsewhereError) -> grpc.aio.Channel:
        if passed_on.current():
            raise UnavailableError(f"{owner}; the run is moving to another replica")
        address, shown = owner.grpc_address, None if self._credentials is None else self._credentials()
        made_with, channel = self._channels.get(address, (None, None))
        if channel is not None and made_with is shown:
            return channel
        if channel is not None:
            self._renewed.append(channel)
        if shown is None:
            channel = grpc.aio.insecure_channel(address, _OPTIONS)
        else:
            channel = grpc.aio.secure_channel(address, shown, _OPTIONS)
        self._channels[address] = shown, channel
        return channel


def _metadata(owner: OwnedElsewhereError, context: Any) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of a forwarded call: its id, the caller's token, and the trace."""
    shown = ((key, value) for key, value in context.invocation_metadata() if key == AUTHORIZATION)
    mine = (passed_on.MARK, owner.secret), (passed_on.CAME_FROM, context.peer())
    return *mine, (tracing.REQUEST_ID, tracing.request_id()), *shown, *tracing.carried().items()


def _left(context: Any) -> float:
    """Returns the seconds until the caller's deadline."""
    left = context.time_remaining()
    return _LONGEST_S if left is None else min(left, _LONGEST_S)
