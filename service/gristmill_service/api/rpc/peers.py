"""Who shares places with whom: callers by their names, and without tokens by the machines they call from."""

from __future__ import annotations

import grpc

from gristmill_service.access import caller
from gristmill_service.access.caller import EVERYONE_IS_ADMIN


def caller_of(context: grpc.ServicerContext) -> str:
    """The caller of a call that is being answered. Where tokens are asked for it must have been identified before."""
    found = caller.current()
    if found is not EVERYONE_IS_ADMIN:
        return found.name
    # As `ipv4:10.0.0.7:51234`: without the port, which each connection has of its own.
    address: str = context.peer()
    return address.rpartition(":")[0] or address
