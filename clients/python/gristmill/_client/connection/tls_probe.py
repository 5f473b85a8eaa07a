"""Finds out whether a port expects TLS, because gRPC's error for it only says that the connection was closed."""

from __future__ import annotations

import socket
import ssl

_TIMEOUT_S = 1.0


def expects_tls(address: str) -> bool:
    """Returns whether the server at HOST:PORT answers a TLS handshake. Blocks for at most a few seconds."""
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), _TIMEOUT_S) as connection,
            context.wrap_socket(connection),
        ):
            return True
    except (OSError, ValueError):
        return False
