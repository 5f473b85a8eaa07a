"""Calls that a replica passes on to the owner of their run: how it proves to be a replica, and what it is believed.

Replicas share a Redis. Each process makes a secret when it starts, and publishes it there with its addresses. A replica
that passes a call on shows the secret of the process that it passes it to. That gives it the role of a *peer*: it is
believed that the call was passed on, and where its caller called from. It is believed nothing about what the caller may
do: the caller's own token goes with the call, and the owner looks it up again.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from contextvars import ContextVar

from gristmill.errors import UnavailableError

MARK = "gristmill-forwarded"
"""The name in gRPC metadata and among HTTP headers of the owner's secret, which is shown with a call that is passed
on."""

CAME_FROM = "gristmill-came-from"
"""Likewise of the address that the caller called from."""

_came_from: ContextVar[str] = ContextVar("gristmill_came_from", default="")


class PeerSecret:
    """This process's own: a replica that shows it is a peer."""

    def __init__(self) -> None:
        self.value = secrets.token_urlsafe(32)

    def came_from(self, shown: Mapping[str, str]) -> str:
        """The address that the caller of a call with these headers called from, where a peer passed it on; else empty.

        Raises UnavailableError where the call is marked as passed on, and not by a peer: the sender may also be one
        that has not heard yet that this process is a new one.
        """
        secret = shown.get(MARK)
        if secret is None:
            return ""
        if not hmac.compare_digest(secret.encode(errors="surrogateescape"), self.value.encode()):
            raise UnavailableError(
                f"the call has the mark {MARK} and does not show this process' secret, as a replica that passes a call "
                "on does; leave the mark out, or retry if a replica passed it on"
            )
        return shown.get(CAME_FROM) or "unknown"


def begin(came_from: str) -> None:
    """The call that is answered from now on in this thread or task was passed on from there; not at all where empty."""
    _came_from.set(came_from)


def current() -> str:
    """The address that the caller called from at the replica that passed this call on; empty where none did."""
    return _came_from.get()
