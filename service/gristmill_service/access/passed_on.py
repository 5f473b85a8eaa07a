"""Authenticates calls that another replica forwards to the owner of their run.

Replicas share a Redis. Each process generates a secret when it starts, and publishes it there with its addresses. A
replica that forwards a call sends the secret of the receiving process. The receiver then trusts it as a *peer*: it
believes that the call was forwarded, and the original address. The secret grants no permission: the peer also sends
the original caller's token, which the owner checks.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from contextvars import ContextVar

from gristmill.errors import UnavailableError

MARK = "gristmill-forwarded"
"""The gRPC metadata key and HTTP header of the owner's secret, sent with forwarded calls."""

CAME_FROM = "gristmill-came-from"
"""The gRPC metadata key and HTTP header of the original caller's address."""

_came_from: ContextVar[str] = ContextVar("gristmill_came_from", default="")


class PeerSecret:
    """This process's secret, with which it authenticates peers."""

    def __init__(self) -> None:
        self.value = secrets.token_urlsafe(32)

    def came_from(self, shown: Mapping[str, str]) -> str:
        """Returns the address of the original caller if a peer forwarded the call; else an empty string.

        Raises UnavailableError if the call is marked as forwarded, but without this process's secret: a replica may
        still use the secret from before a restart.
        """
        secret = shown.get(MARK)
        if secret is None:
            return ""
        if not hmac.compare_digest(secret.encode(errors="surrogateescape"), self.value.encode()):
            raise UnavailableError(
                f"the header {MARK} does not contain this process's secret, which a replica sends with a forwarded "
                "call; leave the header out, or retry if a replica forwarded the call"
            )
        return shown.get(CAME_FROM) or "unknown"


def begin(came_from: str) -> None:
    """Sets the original caller's address for this task; empty if the call was not forwarded."""
    _came_from.set(came_from)


def current() -> str:
    """Returns the original address of a forwarded call; empty for other calls."""
    return _came_from.get()
