"""Converts runs of format 1 in Redis when they are opened.

In format 1, the owner's token, the claim and the snapshot had separate keys, and keys of rows and shards had no hash
tag. Records are unchanged; batches are rebuilt.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import cast

import msgspec

from gristmill.errors import UnavailableError
from gristmill_service.storage.redis.connection import Client
from gristmill_service.storage.redis.keys import RunKeys, reading, scan, sealed, unlink, write_value
from gristmill_service.storage.redis.run_log import RedisRunLog, Snapshot
from gristmill_service.storage.redis.scripts import NOTE
from gristmill_service.storage.row_tables import SIZE_BYTES


class _OldSnapshot(msgspec.Struct, frozen=True):
    name: str
    number: int


def convert(client: Client, log: RedisRunLog, description: bytes) -> None:
    """Converts a run that this process has claimed. May be repeated, also after an incomplete attempt.

    description: the run's description in this version's format, which marks the run as converted.
    """
    keys = log.keys
    fence, claims, snapshot = (f"{keys.tag}:{name}" for name in ("fence", "claims", "snapshot"))
    # Without the token, a former owner of the older version can no longer write.
    client.unlink(fence)
    with reading(claims):
        before = int(cast(bytes, client.get(claims) or b"0"))
    if before >= log.claim:
        log.step(NOTE, "claim", before)
        raise UnavailableError(f"run {keys.run!r} is being converted from format 1; retry")
    _move_rows(client, keys, log.run_id)
    with reading(snapshot):
        if (described := cast(bytes | None, client.get(snapshot))) is not None:
            old = msgspec.msgpack.decode(described, type=_OldSnapshot)
            value = sealed(_pieces(client, old.name))
            made = Snapshot(keys.snapshot(log.token, old.number), old.number, len(value))
            write_value(client, made.name, value)
            log.step(NOTE, "snapshot", made.encode())
    with reading(keys.log):
        for entry, _ in cast(list[tuple[bytes, object]], client.xrevrange(keys.log, count=1)):
            log.step(NOTE, "last", entry)
    client.set(keys.config, description)
    unlink(client, [claims, snapshot, f"{keys.tag}:acknowledged", *keys.scan(client, "batch:")])
    delete_old(client, keys)


def delete_old(client: Client, keys: RunKeys) -> None:
    """Removes the keys of a run of format 1 that do not have the run's hash tag."""
    for kind in ("rows:", "shard:"):
        unlink(client, scan(client, f"{keys.bare}:{kind}"))


def _move_rows(client: Client, keys: RunKeys, nonce: str) -> None:
    for key in scan(client, f"{keys.bare}:rows:{nonce}:"):
        name, _, piece = key.decode().rpartition(":")
        if piece == "0":
            value = b"".join(_pieces(client, name))
            # An incomplete table is not converted, and counts as lost.
            if len(value) == int.from_bytes(value[:SIZE_BYTES], "little"):
                write_value(client, keys.rows(nonce, int(name.rpartition(":")[2])), sealed([value]))


def _pieces(client: Client, name: str) -> Iterator[bytes]:
    for index in count():
        piece = cast(bytes | None, client.get(f"{name}:{index}"))
        if piece is None:
            return
        yield piece
