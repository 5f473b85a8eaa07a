"""A run's tables of rows in Redis, each in values of a few MiB that a cluster spreads over its slots."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import cast
from urllib.parse import quote

from gristmill.errors import NotFoundError
from gristmill_service.storage.redis.servers.connection import Client
from gristmill_service.storage.redis.servers.durability import Durability, pipelined
from gristmill_service.storage.redis.servers.durability import write as set_keys
from gristmill_service.storage.row_tables import SIZE_BYTES

VALUE_BYTES = 8 << 20
_KEYS_AT_ONCE = 500


class RowKeys:
    """The names of a run's rows. nonce: the run's own, so that a run of the same name never meets the rows of the one
    before it."""

    def __init__(self, prefix: str, run: str, nonce: str) -> None:
        self._rows = f"{prefix}:{quote(run, safe='')}:rows:{nonce}"

    def piece(self, number: int, piece: int) -> str:
        return f"{self._rows}:{number}:{piece}"

    def pieces(self, number: int, size: int) -> list[str]:
        """All keys of a table whose values have `size` bytes together."""
        return [self.piece(number, index) for index in range(-(-size // VALUE_BYTES))]

    @property
    def pattern(self) -> str:
        """SCAN finds all of them by it."""
        return f"{_escaped(self._rows)}:*"


def write(client: Client, keys: RowKeys, tables: Mapping[int, bytes], durability: Durability) -> None:
    """Writes encoded tables by their numbers, some MiB at once. May be repeated."""
    parcel: dict[str, memoryview] = {}
    size = 0
    for number, data in tables.items():
        for index, key in enumerate(keys.pieces(number, len(data))):
            value = memoryview(data)[index * VALUE_BYTES : (index + 1) * VALUE_BYTES]
            if parcel and size + len(value) > VALUE_BYTES:
                set_keys(client, parcel, durability)
                parcel, size = {}, 0
            parcel[key] = value
            size += len(value)
    set_keys(client, parcel, durability)


def read(client: Client, keys: RowKeys, number: int) -> bytes:
    """A table's bytes. Raises NotFoundError where a part is missing."""
    first = cast(bytes | None, client.get(keys.piece(number, 0)))
    pieces = [first]
    if first is not None:
        size = int.from_bytes(first[:SIZE_BYTES], "little")
        pieces += [cast(bytes | None, client.get(key)) for key in keys.pieces(number, size)[1:]]
    if None in pieces:
        raise _missing(number)
    whole = cast(list[bytes], pieces)
    return whole[0] if len(whole) == 1 else b"".join(whole)


def read_all(client: Client, keys: RowKeys, sizes: Mapping[int, int]) -> dict[int, bytes]:
    """Tables' bytes by their numbers, those of one value many at once, some MiB of them. sizes: of each, 0 where it is
    not known. Raises NotFoundError as `read`."""
    found: dict[int, bytes] = {}
    parcel: dict[str, int] = {}
    left = 0
    for number, size in sizes.items():
        if not 0 < size <= VALUE_BYTES:
            found[number] = read(client, keys, number)
            continue
        if parcel and (size > left or len(parcel) == _KEYS_AT_ONCE):
            found |= _read_parcel(client, parcel)
            parcel = {}
        left = (left if parcel else VALUE_BYTES) - size
        parcel[keys.piece(number, 0)] = number
    return found | _read_parcel(client, parcel)


def _read_parcel(client: Client, numbers: Mapping[str, int]) -> dict[int, bytes]:
    """Tables of one value each, by the numbers that stand by their keys."""
    answers = pipelined(client, {key: ("GET", key) for key in numbers})
    for key, answer in answers.items():
        if answer is None:
            raise _missing(numbers[key])
    return {numbers[key]: answer for key, answer in answers.items()}


def _missing(number: int) -> NotFoundError:
    return NotFoundError(f"table {number:#x} of rows is not in Redis")


def sizes(client: Client, keys: RowKeys, numbers: Iterable[int]) -> dict[int, int]:
    """Bytes of all values of those tables that are there, by their first value."""
    found: dict[int, int] = {}
    left = iter(numbers)
    while some := list(islice(left, _KEYS_AT_ONCE)):
        names = {keys.piece(number, 0): number for number in some}
        heads = pipelined(client, {name: ("GETRANGE", name, 0, SIZE_BYTES - 1) for name in names})
        for name, head in heads.items():
            if len(head) == SIZE_BYTES:
                found[names[name]] = int.from_bytes(head, "little")
    return found


def remove(client: Client, keys: RowKeys, tables_bytes: dict[int, int]) -> None:
    """Removes tables by their numbers, with the bytes of all their values."""
    unlink(client, [key for number, size in tables_bytes.items() for key in keys.pieces(number, size)])


def sweep(client: Client, keys: RowKeys, wanted: Collection[int], claim: int) -> int:
    """Removes the tables that nobody refers to any more, of claims before this. Returns how many values."""
    found = cast(Iterator[bytes], client.scan_iter(match=keys.pattern, count=_KEYS_AT_ONCE))
    orphans = (key for key in found if (number := _number(key)) not in wanted and number >> 32 < claim)
    return unlink(client, orphans)


def remove_all(client: Client, prefix: str, run: str) -> None:
    """Removes all that is left of the run, but for its fence."""
    name = f"{_escaped(prefix)}:{_escaped(quote(run, safe=''))}"
    for pattern in (f"{name}:rows:*", f"{{{name}}}:snapshot:*"):
        unlink(client, cast(Iterator[bytes], client.scan_iter(match=pattern, count=_KEYS_AT_ONCE)))


def unlink(client: Client, keys: Iterable[str | bytes]) -> int:
    """Removes keys, on a cluster each on the node that has it. Returns how many there were."""
    left, count = iter(keys), 0
    while some := list(islice(left, _KEYS_AT_ONCE)):
        count += client.unlink(*some)
    return count


def _number(key: bytes) -> int:
    return int(key.rsplit(b":", 2)[1])


def _escaped(text: str) -> str:
    """The text as a pattern that matches nothing else."""
    return re.sub(r"([*?\[\]^\\])", r"\\\1", text)
