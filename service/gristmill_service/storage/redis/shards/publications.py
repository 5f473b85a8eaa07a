"""The publications of this process that are under way, so that nobody takes their keys for leftovers."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager


class Publications:
    """Thread-safe. A nonce is `<claim>-<token>`: a publication belongs to the claim of its run under which it began."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens: set[str] = set()

    @contextmanager
    def begin(self, read_claim: Callable[[], int]) -> Iterator[str]:
        """Yields the nonce of a publication that ends with the context."""
        token = secrets.token_hex(8)
        # The token comes first: whoever claims the run after the claim was read finds it under way.
        with self._lock:
            self._tokens.add(token)
        try:
            yield f"{read_claim()}-{token}"
        finally:
            with self._lock:
                self._tokens.remove(token)

    def under_way(self) -> Collection[str]:
        """Their tokens."""
        with self._lock:
            return set(self._tokens)


def is_left_behind(nonce: str, claim: int, under_way: Collection[str]) -> bool:
    """Whether a publication that no index names belongs to an earlier claim, and nobody is at it here."""
    begun_under, _, token = nonce.partition("-")
    return begun_under.isdecimal() and bool(token) and int(begun_under) < claim and token not in under_way
