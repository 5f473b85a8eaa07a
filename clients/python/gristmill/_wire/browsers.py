"""Recognizes HTTP requests that the page of another site sends by its visitor's browser, for the service and the
recorder."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from ipaddress import ip_address

# Domains that cannot be registered (RFC 6761, RFC 6762, ICANN's board resolution 2024.07.29.06).
_PRIVATE = (".localhost", ".local", ".internal", ".svc")
READS = frozenset(["GET", "HEAD", "OPTIONS"])
"""The methods that change nothing."""


class HostNames:
    """The names under which a server is called.

    The site of a page may let its name resolve to this machine after the page is loaded (DNS rebinding). The browser
    then treats the server as part of that site. IP addresses and names that cannot be registered are known, because no
    other site has them.

    patterns: additional names of this server, as shell patterns.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = [pattern.strip().lower() for pattern in patterns]
        self._own = {socket.gethostname().lower(), socket.getfqdn().lower()}

    def has(self, host: str) -> bool:
        """Returns whether the header `Host` of a request contains a known name, or is empty."""
        name = _without_port(host).lower()
        return (
            "." not in name
            or name in self._own
            or name.endswith(_PRIVATE)
            or _is_address(name)
            or any(fnmatchcase(name, pattern) for pattern in self._patterns)
        )


def checked_patterns(names: str) -> str:
    """Returns patterns of host names, separated by commas. Raises ValueError for a URL or port: no host matches it."""
    if ":" in names or "/" in names:
        raise ValueError("expected host names without scheme and port, such as *.example.org, separated by commas")
    return names


def is_of_other_site(headers: Mapping[str, str]) -> bool:
    """Returns whether the page of another site sent the request. The names of the headers ignore case."""
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return True
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != headers.get("host")


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
