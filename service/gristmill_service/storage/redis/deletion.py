"""Deletes runs in Redis so that a deletion that was interrupted at any point can be finished by any process.

A deletion marks the run's head, removes all other keys, then the mark, then the run's name. Keys are removed only while
the mark, which is unique, is in place, or while there is no run of the name: a process that hangs meanwhile never
removes keys of a later run.
"""

from __future__ import annotations

from itertools import islice

from gristmill_service.storage.redis.connection import Client
from gristmill_service.storage.redis.keys import KEYS_AT_ONCE, RunKeys
from gristmill_service.storage.redis.scripts import FORGET, REMOVE, Outcome, Scripts


def finish_deletion(client: Client, scripts: Scripts, keys: RunKeys) -> None:
    """Removes the keys of a run that is marked as deleted, then the mark. Does nothing if there is no mark."""
    mark = client.hget(keys.head, "deleted")
    if isinstance(mark, bytes):
        remove_keys(client, scripts, keys, mark)
        scripts.step(FORGET, keys, mark)


def remove_keys(client: Client, scripts: Scripts, keys: RunKeys, mark: bytes = b"") -> None:
    """Removes the keys of a deleted run, except the mark. Stops if there is another run of the name."""
    left = (key for key in keys.scan(client) if key.decode() not in (keys.head, keys.owner))
    while some := list(islice(left, KEYS_AT_ONCE)):
        if scripts.step(REMOVE, keys, mark, more=some) is Outcome.FENCED:
            return
