"""Requests as they come in: nothing of one is read before its caller is known and it has a place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import grpc

from gristmill.errors import GristmillError, InvalidArgumentError
from gristmill_service.access import caller
from gristmill_service.access.gate import AUTHORIZATION, Gate
from gristmill_service.api.places import Places
from gristmill_service.api.rpc.peers import caller_of

AT_ONCE = 32
"""Requests that are read and answered at once, but for those that wait. Python runs few at a time."""

_LONGEST_S = 20.0


class Intake:
    """Thread-safe. Callers share the places; one whose request has not come gives its place to another
    caller who has fewer, or after 20 s to anyone."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._places = Places(
            AT_ONCE,
            f"{AT_ONCE} requests are being read or answered and none was done within {_LONGEST_S:g} s; retry",
            _LONGEST_S,
            takes_back=True,
        )

    def read(self, requests: Iterator[Any], context: grpc.ServicerContext, held: ExitStack) -> Any:
        """The request, or the error to answer with. held: what is to be closed when it is answered."""
        try:
            self.identify(context)
            place = held.enter_context(self._places.place(caller_of(context), context.cancel, _LONGEST_S))
            request = next(requests, None)
            place.idle_since = None
        except GristmillError as error:
            return error
        if getattr(request, "wait_s", 0.0):
            # It holds a place among those that wait.
            held.close()
        return InvalidArgumentError("the call came without its request; send one") if request is None else request

    def identify(self, context: grpc.ServicerContext) -> None:
        """Finds out who calls, which is told to whoever asks during the call. Raises UnauthenticatedError."""
        if not self._gate.is_open:
            caller.begin(self._gate.identify(dict(context.invocation_metadata()).get(AUTHORIZATION)))
