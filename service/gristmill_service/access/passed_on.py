"""Authenticate calls that another replica passes on to the owner of their run.

Replicas share a Redis. Each process generates a secret when it starts, and publishes it there with its addresses. A
replica that passes a call on sends the secret of the receiving process. This makes it a *peer*: its statements that the
call was passed on, and from which address it came, are believed. It gives no permission: the owner checks the token of
the original caller, which is sent, too.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from contextvars import ContextVar

from gristmill.errors import UnavailableError

MARK = "gristmill-forwarded"
"""The gRPC metadata key and HTTP header of the owner's secret, sent with calls that are passed on."""

CAME_FROM = "gristmill-came-from"
"""The gRPC metadata key and HTTP header of the original caller's address."""

_came_from: ContextVar[str] = ContextVar("gristmill_came_from", default="")


class PeerSecret:
    """This process's secret, by which it recognizes peers."""

    def __init__(self) -> None:
        self.value = secrets.token_urlsafe(32)

    def came_from(self, shown: Mapping[str, str]) -> str:
        """Returns the address of the original caller if a peer passed the call on; else an empty string.

        Raises UnavailableError if the call is marked as passed on, but without this process's secret: a replica may not
        know yet that this process has restarted.
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
    """Sets the original caller's address for this task; empty if the call was not passed on."""
    _came_from.set(came_from)


def current() -> str:
    """Returns the address from which a call that was passed on came; empty for other calls."""
    return _came_from.get()
