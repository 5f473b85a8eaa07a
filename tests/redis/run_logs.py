"""Runs in Redis for tests: small tables, and what lies under their keys."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from gristmill._wire.rows import to_rows
from gristmill._wire.steps import Steps
from gristmill_service.storage.redis.connection import Client
from gristmill_service.storage.redis.run_log import RedisRunLog
from gristmill_service.storage.redis.run_store import RedisRunStore
from gristmill_service.storage.row_tables import Stored, steps_of
from tests.run.harness import row, table

PREFIX = "test"
SHORT_S = 2.0

Join = Callable[..., RedisRunStore]

_numbers = itertools.count()


def any_table(number: int = 0, tokens: int = 20) -> Steps:
    return table(*(row(f"u{number}-{index}", response=range(number, number + tokens)) for index in range(3)))


def same(one: Stored, other: Steps) -> bool:
    return list(to_rows(steps_of(one))) == list(to_rows(other))


def keys(store: RedisRunStore) -> set[str]:
    client: Client = store._client
    return {key.decode() for key in client.scan_iter(match="*") if b":probe" not in key}


def row_keys(store: RedisRunStore) -> set[str]:
    return {key for key in keys(store) if ":rows:" in key}


def expire(store: RedisRunStore, name: str = "run") -> None:
    """As if the owner's lease had run out."""
    store._client.delete(store._keys(name).owner)


def started(log: RedisRunLog) -> list[bytes]:
    """Its records, read as a process that opens a run does first."""
    return list(log.replay().records)


def stored(log: RedisRunLog, rows: Steps) -> int:
    """The number of a table that a record of the log refers to."""
    number = next(_numbers) + log.first_number
    log.append(b"rows", {number: rows})
    return number
