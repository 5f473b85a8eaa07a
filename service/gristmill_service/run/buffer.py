"""The rows that a run holds until their batch is published: the requests' own buffers, kept while a row is needed.

Guarded by the run's lock, but for `gather`, which reads what cannot change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from gristmill.columns import Array, Ragged
from gristmill.steps import Steps, concat
from gristmill_service.run.events import RowRef, StoredRow

DIGEST_BYTES = 16


def digests(steps: Steps) -> list[bytes]:
    """Of each row, all that the client sent but its key: tells a repeated row from another one."""
    columns = [steps.tokens, steps.loss_mask, steps.logprobs, steps.token_rewards, steps.token_advantages]
    views = [column.arrays() for column in columns if column is not None]
    advantages = np.zeros(len(steps)) if steps.advantages is None else steps.advantages
    small = zip(
        steps.prompt_lengths.tolist(),
        steps.is_last_steps.tolist(),
        steps.rewards.tolist(),
        steps.rewards_pending.tolist(),
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


def values_digest(values: Array) -> bytes:
    return blake2b(np.ascontiguousarray(values).data, digest_size=DIGEST_BYTES).digest()


class RowBuffer:
    """Rows by reference. A request's buffers go when the last of its rows is released."""

    def __init__(self) -> None:
        self._chunks: dict[int, Steps] = {}
        self._held: dict[int, int] = {}
        self._rewards: dict[RowRef, Array] = {}
        self._next = 0

    def add(self, steps: Steps, rows: int) -> int:
        """Keeps a request's table, of which so many rows will be referenced; returns its chunk number."""
        chunk = self._next
        self._next += 1
        self._chunks[chunk], self._held[chunk] = steps, rows
        return chunk

    @property
    def next_chunk(self) -> int:
        """The number that `add` gives next."""
        return self._next

    def set_token_rewards(self, ref: RowRef, values: Array) -> None:
        self._rewards[ref] = values

    def release(self, refs: Iterable[RowRef]) -> None:
        for ref in refs:
            self._rewards.pop(ref, None)
            self._held[ref.chunk] -= 1
            if not self._held[ref.chunk]:
                del self._held[ref.chunk], self._chunks[ref.chunk]

    def pick(self, rows: Sequence[StoredRow]) -> list[tuple[Steps, RowRef, StoredRow, Array | None]]:
        """What `gather` needs, to be read after the lock is given back."""
        return [(self._chunks[row.ref.chunk], row.ref, row, self._rewards.get(row.ref)) for row in rows]


def gather(picked: Sequence[tuple[Steps, RowRef, StoredRow, Array | None]], token_rewards: bool) -> Steps:
    """The rows as one table, in this order, with the rewards that came later. Token data is copied once."""
    tables = [_with_rewards(*one, token_rewards) for one in _runs_of_chunk(picked)]
    return concat(tables)


def _runs_of_chunk(
    picked: Sequence[tuple[Steps, RowRef, StoredRow, Array | None]],
) -> list[tuple[Steps, list[StoredRow], list[Array | None]]]:
    """Consecutive rows of one request together, so that a request is cut once and not row by row."""
    runs: list[tuple[Steps, list[StoredRow], list[Array | None]]] = []
    for steps, ref, row, rewards in picked:
        if runs and runs[-1][1][-1].ref.chunk == ref.chunk:
            runs[-1][1].append(row)
            runs[-1][2].append(rewards)
        else:
            runs.append((steps, [row], [rewards]))
    return runs


def _with_rewards(steps: Steps, rows: list[StoredRow], later: list[Array | None], token_rewards: bool) -> Steps:
    table = steps.take(np.array([row.ref.row for row in rows], np.int64))
    table = replace(
        table,
        rewards=np.array([row.reward for row in rows], np.float64),
        rewards_pending=np.zeros(len(rows), np.bool_),
    )
    if not token_rewards:
        return table
    sent = None if table.token_rewards is None else table.token_rewards.arrays()
    values = [
        came if came is not None else np.zeros(row.response_length) if sent is None else sent[index]
        for index, (row, came) in enumerate(zip(rows, later, strict=True))
    ]
    return replace(table, token_rewards=Ragged.from_arrays(values, np.float64))
