"""Who shares places with whom: callers by their names, and without tokens by the machines they call from."""

from __future__ import annotations

from typing import Any

import grpc

from gristmill_service.access import caller
from gristmill_service.access.caller import ANYONE, EVERYONE_IS_ADMIN


def caller_of(context: grpc.ServicerContext) -> str:
    """The caller of a call that is being answered. Where tokens are asked for it must have been identified before."""
    found = caller.current()
    if found is not EVERYONE_IS_ADMIN:
        return found.name
    return _machine(context.peer())


def debtor_of(context: grpc.ServicerContext) -> str:
    """Who makes up for what of this call is refused: a caller's connection, as others may show the same token, and an
    address where it is not known who calls."""
    found = caller.current()
    return _machine(context.peer()) if found is ANYONE else f"{found.name} {context.peer()}"


def queue_of(run: Any = None, answer: Any = None, event: Any = None, *more: Any) -> str:
    """Whose call it is that gRPC hands to its threads, by the machine: who calls is not known before it is read.

    The arguments are gRPC's own. Where a version of it has others, all callers are one.
    """
    try:
        peer: bytes = event.call.peer()
    except AttributeError:
        return ""
    return _machine(peer.decode())


def _machine(address: str) -> str:
    # As `ipv4:10.0.0.7:51234`: without the port, which each connection has of its own.
    return address.rpartition(":")[0] or address
