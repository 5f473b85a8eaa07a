"""Who shares places with whom: callers by their names, and without tokens by the machines they call from.

Of a call that a replica passed on, the caller is where that replica says.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc

from gristmill.errors import UnavailableError
from gristmill_service.access import caller, passed_on
from gristmill_service.access.caller import ANYONE, EVERYONE_IS_ADMIN
from gristmill_service.access.gate import AUTHORIZATION, Gate
from gristmill_service.access.passed_on import MARK


def caller_of(context: grpc.ServicerContext) -> str:
    """The caller of a call that is being answered. Where tokens are asked for it must have been identified before."""
    found = caller.current()
    if found is not EVERYONE_IS_ADMIN:
        return found.name
    return _machine(connection_of(context))


def connection_of(context: grpc.ServicerContext) -> str:
    """The other end of the caller's connection, with its port."""
    return passed_on.current() or context.peer()


def debtor_of(context: grpc.ServicerContext) -> str:
    """Who makes up for what of this call is refused: a caller's connection, as others may show the same token, and an
    address where it is not known who calls."""
    found = caller.current()
    connection = connection_of(context)
    return _machine(connection) if found is ANYONE else f"{found.name} {connection}"


def queue_of(gate: Gate) -> Callable[..., str]:
    """Tells whose call it is that gRPC hands to its threads: by the name of the caller whose token it shows, and by the
    machine where it shows none that is known.

    The arguments are gRPC's own. Where a version of it has others, all callers are one.
    """

    def of_machine(run: Any = None, answer: Any = None, event: Any = None, *more: Any) -> str:
        shown = dict(getattr(event, "invocation_metadata", None) or ())
        if MARK in shown:
            with suppress(UnavailableError):
                return _machine(gate.secret.came_from(shown))
        try:
            peer: bytes = event.call.peer()
        except AttributeError:
            return ""
        return _machine(peer.decode())

    def of_caller(run: Any = None, answer: Any = None, event: Any = None, *more: Any) -> str:
        for name, value in getattr(event, "invocation_metadata", None) or ():
            if name == AUTHORIZATION and (found := gate.name_of(value)):
                return found
        return of_machine(run, answer, event)

    return of_machine if gate.is_open else of_caller


def _machine(address: str) -> str:
    # As `ipv4:10.0.0.7:51234`: without the port, which each connection has of its own.
    return address.rpartition(":")[0] or address
