"""A run's tables of rows in Redis, each in values of a few MiB that a cluster spreads over its slots."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import Any, cast
from urllib.parse import quote

from gristmill._wire.steps import Steps
from gristmill.errors import NotFoundError
from gristmill_service.storage import row_tables
from gristmill_service.storage.redis.connection import Client

VALUE_BYTES = 8 << 20
_KEYS_AT_ONCE = 500
# Before a table's bytes their number, so that any of its values tells how many there are.
_SIZE_BYTES = 8


class RowKeys:
    """nonce: of the run, so that a run of the same name never meets rows of the one before it."""

    def __init__(self, prefix: str, run: str, nonce: str) -> None:
        self._rows = f"{prefix}:{quote(run, safe='')}:rows:{nonce}"

    def piece(self, number: int, piece: int) -> str:
        return f"{self._rows}:{number}:{piece}"

    def pieces(self, number: int, size: int) -> list[str]:
        """All keys of a table of `size` bytes."""
        return [self.piece(number, index) for index in range(-(-(size + _SIZE_BYTES) // VALUE_BYTES))]

    @property
    def pattern(self) -> str:
        """What SCAN finds them by."""
        return f"{_escaped(self._rows)}:*"


def write(client: Client, keys: RowKeys, number: int, table: Steps) -> int:
    """Returns the table's bytes."""
    encoded = row_tables.encode(table)
    data = b"".join([encoded.size.to_bytes(_SIZE_BYTES, "little"), *encoded.buffers])
    names = keys.pieces(number, encoded.size)
    for index, key in enumerate(names):
        view = memoryview(data)[index * VALUE_BYTES : (index + 1) * VALUE_BYTES] if len(names) > 1 else data
        client.set(key, cast(Any, view))
    return encoded.size


def read(client: Client, keys: RowKeys, number: int) -> Steps:
    """Raises NotFoundError where a part is missing."""
    first = cast(bytes | None, client.get(keys.piece(number, 0)))
    pieces = [first]
    if first is not None:
        size = int.from_bytes(first[:_SIZE_BYTES], "little")
        pieces += [cast(bytes | None, client.get(key)) for key in keys.pieces(number, size)[1:]]
    if None in pieces:
        raise NotFoundError(f"table {number:#x} of rows is not in Redis")
    whole = cast(list[bytes], pieces)
    data = memoryview(whole[0] if len(whole) == 1 else b"".join(whole))
    return row_tables.decode(data[_SIZE_BYTES:])


def sizes(client: Client, keys: RowKeys, numbers: Iterable[int]) -> dict[int, int]:
    """Bytes of those tables that are there, by their first value."""
    found: dict[int, int] = {}
    left = iter(numbers)
    while some := list(islice(left, _KEYS_AT_ONCE)):
        asking = client.pipeline(transaction=False)
        for number in some:
            asking.getrange(keys.piece(number, 0), 0, _SIZE_BYTES - 1)
        for number, head in zip(some, asking.execute(), strict=True):
            if len(head) == _SIZE_BYTES:
                found[number] = int.from_bytes(head, "little")
    return found


def remove(client: Client, keys: RowKeys, tables_bytes: dict[int, int]) -> None:
    """Tables by their numbers, with their bytes."""
    unlink(client, [key for number, size in tables_bytes.items() for key in keys.pieces(number, size)])


def sweep(client: Client, keys: RowKeys, kept: Collection[int], claim: int) -> int:
    """Removes the tables that nobody refers to any more, of claims before this. Returns how many values."""
    found = cast(Iterator[bytes], client.scan_iter(match=keys.pattern, count=_KEYS_AT_ONCE))
    orphans = (key for key in found if (number := _number(key)) not in kept and number >> 32 < claim)
    return unlink(client, orphans)


def remove_all(client: Client, prefix: str, run: str) -> None:
    """Whatever is left of the run, but for its fence."""
    name = f"{_escaped(prefix)}:{_escaped(quote(run, safe=''))}"
    for pattern in (f"{name}:rows:*", f"{{{name}}}:snapshot:*"):
        unlink(client, cast(Iterator[bytes], client.scan_iter(match=pattern, count=_KEYS_AT_ONCE)))


def unlink(client: Client, keys: Iterable[str | bytes]) -> int:
    """On a cluster, each on the node that has it. Returns how many."""
    left, count = iter(keys), 0
    while some := list(islice(left, _KEYS_AT_ONCE)):
        count += client.unlink(*some)
    return count


def _number(key: bytes) -> int:
    return int(key.rsplit(b":", 2)[1])


def _escaped(text: str) -> str:
    """As itself in a pattern."""
    return re.sub(r"([*?\[\]^\\])", r"\\\1", text)
