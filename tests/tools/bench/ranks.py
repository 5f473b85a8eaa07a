"""Callers that cost next to nothing, so that what is measured is the service: one thread, a socket for each, and of
HTTP/2 only what one gRPC call needs. Dozens of gRPC channels in one process would wait for each other's Python."""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections.abc import Callable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING = 0, 1, 4, 6
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4


class Ranks:
    """Connections to an address HOST:PORT, each for one call at a time."""

    def __init__(self, address: str, count: int) -> None:
        host, _, port = address.rpartition(":")
        self._sockets = [socket.create_connection((host, int(port))) for _ in range(count)]
        self._selector = selectors.DefaultSelector()
        for one in self._sockets:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            one.sendall(PREFACE + frame(_SETTINGS, 0, 0, b""))
            self._selector.register(one, selectors.EVENT_READ)
        self._address, self._stream = address, -1

    def ask(self, method: str, request: bytes) -> None:
        """The same unary call by each."""
        self._stream += 2
        head = {":method": "POST", ":scheme": "http", ":path": method, ":authority": self._address}
        head |= {"te": "trailers", "content-type": "application/grpc"}
        fields = b"".join(b"\0" + text(name) + text(value) for name, value in head.items())
        message = struct.pack(">BI", 0, len(request)) + request
        call = frame(_HEADERS, _END_HEADERS, self._stream, fields) + frame(_DATA, _END_STREAM, self._stream, message)
        for one in self._sockets:
            one.sendall(call)

    def answered(self) -> list[float]:
        """When (time.monotonic) the answer of each had come, its trailers too."""
        buffers = dict.fromkeys(self._sockets, b"")
        times: list[float] = []
        while len(times) < len(self._sockets):
            for key, _ in self._selector.select(60):
                one: socket.socket = key.fileobj  # type: ignore[assignment]
                came = one.recv(1 << 16)
                now = time.monotonic()
                if not came:
                    raise ConnectionError(f"{self._address} has closed a rank's connection")
                buffers[one] = self._rest(one, buffers[one] + came, lambda now=now: times.append(now))  # type: ignore[misc]
        return times

    def _rest(self, one: socket.socket, data: bytes, on_end: Callable[[], None]) -> bytes:
        """Returns the bytes behind the whole frames. Servers close connections that never acknowledge settings."""
        at = 0
        while len(data) - at >= 9:
            size, kind, flags = int.from_bytes(data[at : at + 3]), data[at + 3], data[at + 4]
            if len(data) - at < 9 + size:
                break
            stream, payload = int.from_bytes(data[at + 5 : at + 9]), data[at + 9 : at + 9 + size]
            if kind in (_SETTINGS, _PING) and not flags & _ACK:
                one.sendall(frame(kind, _ACK, 0, payload if kind == _PING else b""))
            if stream == self._stream and kind in (_DATA, _HEADERS) and flags & _END_STREAM:
                on_end()
            at += 9 + size
        return data[at:]

    def close(self) -> None:
        self._selector.close()
        for one in self._sockets:
            one.close()


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def text(value: str) -> bytes:
    """HPACK's string, without Huffman's code; shorter than 255 bytes."""
    length = bytes((len(value),)) if len(value) < 127 else bytes((127, len(value) - 127))
    return length + value.encode()
