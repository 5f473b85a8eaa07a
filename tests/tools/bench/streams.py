"""gRPC calls written by hand, so that a flood can do what gRPC's own clients do not: send a message byte by byte, leave
answers unread, reset streams, and keep a number of calls under way at full speed."""

from __future__ import annotations

import socket
import struct

from tests.tools.bench.ranks import PREFACE, frame, text

_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_CANCEL = struct.pack(">I", 8)
_LAST_STREAM = 1 << 30
_FRAME_BYTES = 16_384
"""The largest frame unless the other side's settings allow more."""


def message(data: bytes) -> bytes:
    return struct.pack(">BI", 0, len(data)) + data


class Connection:
    """One connection. Its windows for answers are never opened, so that a long answer stays unread.

    running: the streams that have not ended. resets: whether streams are reset once they have an answer.
    """

    def __init__(self, address: str, metadata: dict[str, str], *, resets: bool = False) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._head = {":scheme": "http", ":authority": address, "te": "trailers", "content-type": "application/grpc"}
        self._head |= metadata
        self.running, self._resets = set[int](), resets
        self._unsent, self._read, self._stream, self._window = PREFACE + frame(_SETTINGS, 0, 0, b""), b"", -1, 65_535

    @property
    def is_spent(self) -> bool:
        """Whether another connection has to take over, or data has to wait for the other side."""
        return self._stream >= _LAST_STREAM or self._window < 4096

    def begin(self, path: str, data: bytes, *, ends: bool = True) -> None:
        """Begins a call with these bytes of its request."""
        self._stream += 2
        head = {":method": "POST", ":path": path} | self._head
        fields = b"".join(b"\0" + text(name) + text(value) for name, value in head.items())
        self._unsent += frame(_HEADERS, _END_HEADERS, self._stream, fields)
        self.send(self._stream, data, ends=ends)
        self.running.add(self._stream)

    def send(self, stream: int, data: bytes, *, ends: bool = False) -> None:
        self._window -= len(data)
        # The service ends a connection that sends a larger frame, and with it all its calls.
        for at in range(0, len(data), _FRAME_BYTES):
            is_last = at + _FRAME_BYTES >= len(data)
            part = data[at : at + _FRAME_BYTES]
            self._unsent += frame(_DATA, _END_STREAM if ends and is_last else 0, stream, part)

    def flush(self) -> None:
        unsent, self._unsent = self._unsent, b""
        if unsent:
            self._socket.sendall(unsent)

    def read(self, timeout_s: float) -> None:
        """Waits for bytes at most this long, and handles what came. Raises ConnectionError when the other side has
        closed the connection."""
        self._socket.settimeout(timeout_s)
        try:
            came = self._socket.recv(1 << 18)
        except TimeoutError:
            return
        finally:
            self._socket.settimeout(60)
        if not came:
            raise ConnectionError("closed")
        data, at = self._read + came, 0
        while len(data) - at >= 9 and len(data) - at >= (end := 9 + int.from_bytes(data[at : at + 3])):
            self._handle(data[at + 3], data[at + 4], int.from_bytes(data[at + 5 : at + 9]), data[at + 9 : at + end])
            at += end
        self._read = data[at:]

    def _handle(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind in (_SETTINGS, _PING) and not flags & _ACK:
            self._unsent += frame(kind, _ACK, 0, payload if kind == _PING else b"")
        elif kind == _WINDOW and not stream:
            self._window += int.from_bytes(payload)
        elif kind == _GOAWAY:
            raise ConnectionError("told to go away")
        elif kind == _RESET or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
            self.running.discard(stream)
        elif kind == _DATA and self._resets and stream in self.running:
            self.running.discard(stream)
            self._unsent += frame(_RESET, 0, stream, _CANCEL)

    def close(self) -> None:
        self._socket.close()
