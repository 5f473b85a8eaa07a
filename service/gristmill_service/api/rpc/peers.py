"""Who shares places with whom: callers by their names, and without tokens by the machines they call from."""

from __future__ import annotations

import grpc

from gristmill_service.access import caller
from gristmill_service.access.caller import ANYONE, EVERYONE_IS_ADMIN


def caller_of(context: grpc.ServicerContext) -> str:
    """The caller of a call that is being answered. Where tokens are asked for it must have been identified before."""
    found = caller.current()
    if found is not EVERYONE_IS_ADMIN:
        return found.name
    return _address(context)


def debtor_of(context: grpc.ServicerContext) -> str:
    """Who makes up for what of this call is refused: a caller's connection, as others may show the same token, and an
    address where it is not known who calls."""
    found = caller.current()
    return _address(context) if found is ANYONE else f"{found.name} {context.peer()}"


def _address(context: grpc.ServicerContext) -> str:
    # As `ipv4:10.0.0.7:51234`: without the port, which each connection has of its own.
    address: str = context.peer()
    return address.rpartition(":")[0] or address
