"""Limits the bytes of requests and answers in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gristmill_recorder.refusals import Busy, NotRecorded, TooLarge


class Buffers:
    """Counts the bytes that all calls have in memory.

    max_each: the limit of a request, and of an answer. max_total: the limit of all. Requests alone take at most half of
    it, so that the answers to those that were accepted have space. size: the bytes now.
    """

    def __init__(self, max_each: int, max_total: int) -> None:
        self.max_each, self._max_total = max_each, max_total
        self.size = 0

    @contextmanager
    def buffer(self) -> Iterator[Buffer]:
        """Yields the buffer of one call, and frees its bytes after the block."""
        buffer = Buffer(self)
        try:
            yield buffer
        finally:
            self.size -= buffer.size

    def take_request(self, size: int) -> None:
        self._take(size, self._max_total // 2)

    def take(self, size: int) -> None:
        self._take(size, self._max_total)

    def _take(self, size: int, most: int) -> None:
        if size > 0 and self.size + size > most:
            raise Busy(
                f"requests and answers have {self.size} bytes in memory, where --max-in-flight-bytes is "
                f"{self._max_total:d}; retry, or raise --max-in-flight-bytes"
            )
        self.size += size


class Buffer:
    """The bytes of one call. Its methods raise Busy if those of all calls exceed the limit."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers, self._request, self._answer = buffers, 0, 0

    @property
    def size(self) -> int:
        return self._request + self._answer

    def add_request(self, size: int) -> None:
        """Adds bytes of the request. Raises TooLarge above the limit of one."""
        if self._request + size > self._buffers.max_each:
            raise TooLarge(
                f"the request is larger than --max-body-bytes, {self._buffers.max_each}; shorten it, or raise "
                "--max-body-bytes"
            )
        self._buffers.take_request(size)
        self._request += size

    def resize_answer(self, what: str, size: int) -> None:
        """Sets the bytes of the answer that are not sent yet. what: the part that has them, for the error. Raises
        NotRecorded above the limit of one."""
        if size > self._buffers.max_each:
            raise NotRecorded(
                f"{what} is larger than --max-body-bytes, {self._buffers.max_each}; raise --max-body-bytes"
            )
        self._buffers.take(size - self._answer)
        self._answer = size
