"""How much JSON is read: Python holds it in tens of times its bytes, and does nothing else while it reads."""

from __future__ import annotations

from gristmill.errors import InvalidArgumentError

_MOST_BYTES = 16 << 20
# By the characters that each has: what stands within texts counts, too.
_MOST = {b"{": (1 << 16, "objects"), b"[": (1 << 20, "lists"), b'"': (1 << 21, "quotation marks")}


def check_json(body: bytes) -> None:
    """Raises InvalidArgumentError for a body that would take much longer, and more memory, than its bytes tell."""
    if len(body) > _MOST_BYTES:
        raise InvalidArgumentError(
            f"the body has {len(body)} bytes, and JSON may have {_MOST_BYTES}; send less a request, or rows as "
            "application/x-protobuf, or over gRPC"
        )
    for character, (most, what) in _MOST.items():
        # A character a byte at most: few bodies need counting.
        if len(body) > most and (count := body.count(character)) > most:
            raise InvalidArgumentError(f"the body has {count} {what}, and JSON may have {most}; send less a request")
