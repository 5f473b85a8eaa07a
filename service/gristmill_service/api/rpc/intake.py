"""Requests as they come in: nothing of one is read before its caller is known and it has a place."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from gristmill.errors import GristmillError, InvalidArgumentError, UnauthenticatedError, UnavailableError
from gristmill_service.access import caller, passed_on
from gristmill_service.access.caller import ANYONE
from gristmill_service.access.gate import AUTHORIZATION, Gate
from gristmill_service.api.places import Places
from gristmill_service.api.rpc.peers import caller_of, debtor_of
from gristmill_service.call_threads import waiting

AT_ONCE = 32
"""Requests that are read and answered at once, but for those that wait. Python runs few at a time."""

_LONGEST_S = 20.0

_size: ContextVar[int] = ContextVar("gristmill_request_size", default=0)
"""Of the request that is being answered, in bytes."""


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

    def read(
        self,
        requests: Iterator[bytes],
        parse: Callable[[bytes], Any],
        context: grpc.ServicerContext,
        held: ExitStack,
    ) -> Any:
        """The request, or the error to answer with. held: what is to be closed when it is answered."""
        try:
            self._admit(context)
            place = held.enter_context(self._places.place(caller_of(context), context.cancel, _LONGEST_S))
            data = next(requests, None)
            place.idle_since = None
            if data is None:
                raise InvalidArgumentError("the call has no request message; send one")
            request = parsed(data, parse)
        except GristmillError as error:
            # Whoever raises it again makes a circle of it and its frames: they would keep the request's bytes until
            # garbage is collected, which a service does seldom.
            error.__context__ = None
            return error.with_traceback(None)
        if getattr(request, "wait_s", 0.0):
            # It holds a place among those that wait.
            held.close()
        return request

    def _admit(self, context: grpc.ServicerContext) -> None:
        """Finds out who calls, and has those wait who owe for calls that were refused. Raises UnauthenticatedError,
        ResourceExhaustedError where that would be too long, and UnavailableError for a mark that only a peer may
        show."""
        _size.set(0)
        shown = dict(context.invocation_metadata())
        self._find_origin(shown, context)
        if self._gate.is_open:
            return
        debts = self._gate.debts
        try:
            caller.begin(self._gate.identify(shown.get(AUTHORIZATION)))
        except UnauthenticatedError:
            self._refuse_unknown(context)
            raise
        if debts.any_owe:
            debtor = debtor_of(context)
            self._wait(debtor)
            debts.check(debtor)

    def _find_origin(self, shown: Mapping[str, str], context: grpc.ServicerContext) -> None:
        passed_on.begin("")
        try:
            passed_on.begin(self._gate.came_from(shown))
        except UnavailableError:
            if not self._gate.is_open:
                self._refuse_unknown(context)
                self.charge(context, UnauthenticatedError.code)
            raise

    def _refuse_unknown(self, context: grpc.ServicerContext) -> None:
        """Returns when a caller who is not known may be told so."""
        caller.begin(ANYONE)
        self._wait(debtor_of(context))

    def charge(self, context: grpc.ServicerContext, code: str) -> None:
        """The call was refused with this status."""
        if not self._gate.is_open:
            self._gate.debts.charge(debtor_of(context), code, _size.get())

    def _wait(self, debtor: str) -> None:
        with self._gate.debts.waiting(debtor) as wait_s:
            if wait_s:
                with waiting():
                    time.sleep(wait_s)


def parsed(data: bytes, parse: Callable[[bytes], Any]) -> Any:
    """The request. Raises InvalidArgumentError. gRPC itself would read it in the one thread that serves all calls, and
    answer INTERNAL where it is none, as if it were our fault."""
    _size.set(len(data))
    try:
        return parse(data)
    except DecodeError as error:
        raise InvalidArgumentError(
            f"the request is not a message of gristmill.v1: {error}; send the message that the protos describe"
        ) from None
