"""Large requests that the service reads in a file, where both are on one machine: a connection would copy each byte six
times.

The columns of large tables are made in that file (`gristmill._wire.shared_files`), so that a request says where they
stand. The service names the socket over which it is passed the file. Who cannot connect there, because it is another
machine's or another user's, sends its requests.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from gristmill._wire.codecs.submit_codec import MOST_PARTS, Buffer
from gristmill._wire.shared_files import SHARED, Block, SharedFile
from gristmill.errors import DeadlineExceededError, GristmillError, UnavailableError
from gristmill.v1 import rollout_pb2

# So much is looked for in the file; smaller pieces are copied there together, and a few bytes are sent.
_APART_BYTES = 64 << 10
_SENT_BYTES = 4 << 10
# Of requests in a row that the service could not read.
_MOST_FAILURES = 2


class RequestInFile(NamedTuple):
    """message: the request that says where its bytes stand. blocks: those that are written for it alone."""

    file: SharedFile
    message: bytes
    blocks: Sequence[Block]


class RequestFiles:
    """A client's. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._address = self._refused = ""
        self._failures = 0

    def told(self, address: str) -> None:
        """The service is passed files there; it says nothing where it takes none."""
        if address and address not in (self._address, self._refused):
            self._address = address
            SHARED.use(address)

    def write(self, pieces: Sequence[Buffer]) -> RequestInFile | None:
        """The request of these bytes, which are not written over before the answer; None where it has to be sent."""
        address = self._address
        if not address or (file := SHARED.of(address)) is None:
            return None
        return _written(file, pieces)

    def answered(self) -> None:
        """The service read the last request in the file."""
        self._failures = 0

    def failed(self, request: RequestInFile, error: GristmillError) -> None:
        """What the service may not be able to read is sent for now; what it may still read is not written over."""
        with self._lock:
            # Of requests that were under way together the first to fail says it.
            if isinstance(error, UnavailableError) and request.file.address == self._address:
                self._failures += 1
                if self._failures >= _MOST_FAILURES:
                    self._refused = self._address
                SHARED.leave(self._address)
                self._address = ""
        if isinstance(error, (UnavailableError, DeadlineExceededError)) or type(error) is GristmillError:
            SHARED.retire(request.file)


def _written(file: SharedFile, pieces: Sequence[Buffer]) -> RequestInFile | None:
    """None where the file has no room, or the request would be of too many parts."""
    message, blocks = rollout_pb2.RequestFile(name=file.name), list[Block]()
    placed = [(piece, file.offset_of(piece) if len(piece) >= _APART_BYTES else None) for piece in pieces]
    for is_elsewhere, some in groupby(placed, lambda one: one[1] is None):
        if not is_elsewhere:
            for piece, offset in some:
                message.parts.add(offset=offset, size=len(piece))
            continue
        rest = [piece for piece, _ in some]
        if sum(map(len, rest)) <= _SENT_BYTES:
            message.parts.add(data=b"".join(rest))
        elif (block := _copied(file, rest)) is not None:
            blocks.append(block)
            message.parts.add(offset=file.offset_of(block.data), size=len(block))
        else:
            return None
    if len(message.parts) > MOST_PARTS:
        return None
    request = rollout_pb2.SubmitRowsRequest(file=message)
    return RequestInFile(file, request.SerializeToString(), blocks)


def _copied(file: SharedFile, pieces: Sequence[Buffer]) -> Block | None:
    block = file.take(sum(map(len, pieces)))
    if block is not None:
        np.concatenate([np.frombuffer(piece, np.uint8) for piece in pieces], out=block)
    return block
