"""Distinguishes the addresses of this machine from those of others."""

from __future__ import annotations

from ipaddress import ip_address


def is_of_this_machine(address: str) -> bool:
    """Returns whether only this machine can be reached at an address, HOST:PORT or unix:/PATH: a socket, `localhost`,
    or a loopback address."""
    host = address.rpartition(":")[0].strip("[]")
    if address.startswith("unix:") or host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
