"""The rows that a run holds until their batch is published: the requests' own buffers, kept while a row is needed.

Guarded by the run's lock, but for the functions, which read what cannot change: work per token needs no lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from gristmill.columns import Array, Ragged
from gristmill.steps import Steps, concat
from gristmill_service.run.events import RowRef, StoredRow

DIGEST_BYTES = 16


def row_digests(steps: Steps) -> list[bytes]:
    """Of each row, all that the client sent but its key: tells a repeated row from another one.

    What stands in place of a pending reward is not sent, and so does not count.
    """
    columns = [steps.tokens, steps.loss_mask, steps.logprobs, steps.token_advantages]
    views = [column.arrays() for column in columns if column is not None]
    advantages = np.zeros(len(steps)) if steps.advantages is None else steps.advantages
    small = zip(
        steps.prompt_lengths.tolist(),
        steps.is_last_steps.tolist(),
        np.where(steps.rewards_pending, 0.0, steps.rewards).tolist(),
        steps.rewards_pending.tolist(),
        reward_digests(steps),
        advantages.tolist(),
        steps.policy_versions.tolist(),
        steps.stop_reasons,
        strict=True,
    )
    found = []
    for row, numbers in enumerate(small):
        digest = blake2b(repr(numbers).encode(), digest_size=DIGEST_BYTES)
        for arrays in views:
            digest.update(arrays[row].data)
        found.append(digest.digest())
    return found


def reward_digests(steps: Steps) -> list[bytes]:
    """Of each row's rewards per token; empty where they are scalar or pending."""
    if steps.token_rewards is None:
        return [b""] * len(steps)
    return [
        b"" if pending else values_digest(values)
        for values, pending in zip(steps.token_rewards.arrays(), steps.rewards_pending.tolist(), strict=True)
    ]


def values_digest(values: Array) -> bytes:
    """The same for equal numbers, whatever their width."""
    return blake2b(np.ascontiguousarray(values, np.float64).data, digest_size=DIGEST_BYTES).digest()


@dataclass(slots=True)
class _Chunk:
    """A request's table. live: the rows that are needed, by their number in the request: where each is in the table."""

    steps: Steps
    live: dict[int, int]

    @property
    def is_sparse(self) -> bool:
        return 2 * len(self.live) <= len(self.steps)


class PickedRow(NamedTuple):
    """A row, and the table and place in it where its data is; `rewards` per token where they came after the row."""

    steps: Steps
    at: int
    row: StoredRow
    rewards: Array | None


class RowBuffer:
    """Rows by reference. A request's buffers go when the last of its rows is released, and shrink before that."""

    def __init__(self) -> None:
        self._chunks: dict[int, _Chunk] = {}
        self._sparse: set[int] = set()
        self._rewards: dict[RowRef, Array] = {}

    def __len__(self) -> int:
        """Rows of all tables that are held, needed or not."""
        return sum(len(chunk.steps) for chunk in self._chunks.values())

    def add(self, chunk: int, steps: Steps, rows: Iterable[int]) -> None:
        """Keeps a request's table, of which these rows are referenced."""
        added = self._chunks[chunk] = _Chunk(steps, {row: row for row in rows})
        if added.is_sparse:
            self._sparse.add(chunk)

    def set_token_rewards(self, ref: RowRef, values: Array) -> None:
        self._rewards[ref] = values

    def release(self, refs: Iterable[RowRef]) -> None:
        for ref in refs:
            self._rewards.pop(ref, None)
            chunk = self._chunks[ref.chunk]
            del chunk.live[ref.row]
            if not chunk.live:
                del self._chunks[ref.chunk]
                self._sparse.discard(ref.chunk)
            elif chunk.is_sparse:
                self._sparse.add(ref.chunk)

    def pick(self, rows: Iterable[StoredRow]) -> list[PickedRow]:
        """What `gather` needs, to be read after the lock is given back."""
        found = []
        for row in rows:
            chunk = self._chunks[row.ref.chunk]
            found.append(PickedRow(chunk.steps, chunk.live[row.ref.row], row, self._rewards.get(row.ref)))
        return found

    def take_sparse(self) -> list[tuple[int, Steps, dict[int, int]]]:
        """Tables at most half of which is needed, so that they hold more memory than is accounted for."""
        sparse, self._sparse = self._sparse, set()
        return [(number, chunk.steps, dict(chunk.live)) for number in sparse if (chunk := self._chunks.get(number))]

    def replace(self, number: int, before: Steps, after: Steps, index: dict[int, int]) -> None:
        """Holds `after` in place of `before`, unless that is gone meanwhile. index: where each row is in it."""
        chunk = self._chunks.get(number)
        if chunk is not None and chunk.steps is before:
            chunk.steps, chunk.live = after, {row: index[row] for row in chunk.live}


def compacted(steps: Steps, live: dict[int, int]) -> tuple[Steps, dict[int, int]]:
    """A copy of these rows of the table alone, and where each of them is in it."""
    table = steps.take(np.fromiter(live.values(), np.int64, len(live)))
    copies: dict[str, Any] = {
        field.name: Ragged.from_arrays(column.arrays(), column.values.dtype)
        for field in fields(table)
        if isinstance(column := getattr(table, field.name), Ragged)
    }
    return replace(table, **copies), {row: index for index, row in enumerate(live)}


def gather(picked: Sequence[PickedRow], token_rewards: bool) -> Steps:
    """The rows as one table, in this order, with the rewards that came later. Token data is copied once."""
    chunks: dict[int, list[int]] = {}
    for position, one in enumerate(picked):
        chunks.setdefault(id(one.steps), []).append(position)
    table = concat([_part([picked[position] for position in positions]) for positions in chunks.values()])
    order = np.empty(len(picked), np.int64)
    order[[position for positions in chunks.values() for position in positions]] = np.arange(len(picked))
    table = replace(
        table.take(order),
        rewards=np.array([one.row.reward for one in picked], np.float64),
        rewards_pending=np.zeros(len(picked), np.bool_),
    )
    return _with_token_rewards(table, picked) if token_rewards else replace(table, token_rewards=None)


def _part(picked: list[PickedRow]) -> Steps:
    """Rows of one request. Which have rewards per token, and which wait for them, differs between requests."""
    return replace(picked[0].steps.take(np.array([one.at for one in picked], np.int64)), token_rewards=None)


def _with_token_rewards(table: Steps, picked: Sequence[PickedRow]) -> Steps:
    values = []
    for one in picked:
        sent = one.steps.token_rewards
        if one.rewards is not None:
            values.append(one.rewards)
        else:
            assert sent is not None, "a row without a later reward brought its own"
            values.append(sent[one.at])
    return replace(table, token_rewards=Ragged.from_arrays(values, np.float64))
