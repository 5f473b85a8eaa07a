"""Numbers of things in words."""

from __future__ import annotations


def counted(number: int, one: str, many: str = "") -> str:
    """As in "1 rank", "2 ranks". many: where it is not `one` with an s."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"
