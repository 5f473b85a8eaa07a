"""The streams that are open: bounded, as each takes a thread for as long as its caller likes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import grpc

from gristmill_service.api.places import Places
from gristmill_service.api.rpc.peers import caller_of

T = TypeVar("T")
_PATIENCE_S = 60.0


class Streams:
    """Thread-safe."""

    def __init__(self, limit: int) -> None:
        refusal = f"{limit} streams are open and max_streams allows no more; retry, or raise the setting"
        self._places = Places(limit, refusal, _PATIENCE_S, takes_back=True)

    def read(self, answers: Iterator[T], context: grpc.ServicerContext) -> Iterator[T]:
        """Gives the answers of a stream. A caller who takes none of them is idle.

        Raises ResourceExhaustedError where there is no place left.
        """
        with self._places.place(caller_of(context), context.cancel) as place:
            for answer in answers:
                place.idle_since = self._places.clock()
                yield answer
                place.idle_since = None
