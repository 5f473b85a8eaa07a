"""The rows that a run holds until their batch is freed: the requests' own tables, kept while a row is needed.

Guarded by the run's lock, but for the functions, which read what cannot change: work per token needs no lock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
from xxhash import xxh3_128

from gristmill._wire.columns import Array, Ragged, bytes_of
from gristmill._wire.steps import Extra, Steps, concat
from gristmill_service.run.machine.events import COLUMNS, RowRef, StoredRow

_SMALL = Struct("<qqi??dd16s")


def row_digests(steps: Steps, shared: Collection[str] = ()) -> list[bytes]:
    """Of each row, all that the client sent but its key: tells a repeated row from another one, and whole ones from
    damaged ones.

    What stands in place of a pending reward is not sent, and so does not count. shared: columns whose values a row may
    lack where the step before has them (`ColumnSpec.is_shared`); a later step's values of prompt tokens do not count.
    """
    columns = [steps.tokens, steps.loss_mask, steps.logprobs, steps.token_advantages]
    arrays: list[list[Any]] = [column.arrays() for column in columns if column is not None]
    if steps.token_versions is not None:
        arrays.append(_token_versions(steps, steps.token_versions))
    extras = [part for name in sorted(steps.extras) for part in _extra_parts(steps, name, name in shared)]
    found = []
    for small, *values in zip(_small_fields(steps), *arrays, *extras, strict=True):
        digest = xxh3_128(small)
        for array in values:
            digest.update(array)
        found.append(digest.digest())
    return found


def _extra_parts(steps: Steps, name: str, is_shared: bool) -> tuple[list[bytes], list[Array]]:
    """Of each row, that it has the column, and the values."""
    extra = steps.extras[name]
    values: list[Array] = extra.values.arrays()
    if is_shared:
        counts = np.where(steps.steps > 0, steps.response_lengths, extra.values.lengths).tolist()
        values = [one[max(0, len(one) - count) :] for one, count in zip(values, counts, strict=True)]
    # A column that is given with nothing in it is not one that is not given; and where one column's values end and
    # another column begins is part of what was sent.
    labels = [
        name.encode() + b"\0" + len(one).to_bytes(8, "little") if given else b""
        for one, given in zip(values, extra.given.tolist(), strict=True)
    ]
    return labels, values


def _token_versions(steps: Steps, versions: Ragged) -> list[Any]:
    """Of each row; none where all tokens have the row's own: it may have come so, beside others that had not."""
    own = steps.policy_versions.tolist()
    return [b"" if (array == version).all() else array for array, version in zip(versions.arrays(), own, strict=True)]


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
    return xxh3_128(bytes_of(values.astype(np.float64, copy=False))).digest()


def _small_fields(steps: Steps) -> Iterator[bytes]:
    """Of each row the fields that are no columns of tokens; what is of no fixed length comes last."""
    count = len(steps)
    columns = zip(
        steps.prompt_lengths.tolist(),
        steps.response_lengths.tolist(),
        steps.policy_versions.tolist(),
        steps.is_last_steps.tolist(),
        steps.rewards_pending.tolist(),
        steps.rewards.tolist(),
        [0.0] * count if steps.advantages is None else steps.advantages.tolist(),
        reward_digests(steps),
        steps.stop_reasons,
        strict=True,
    )
    for prompt, response, version, last, pending, reward, advantage, rewards, reason in columns:
        # A negative zero is the same number as the other one.
        given = 0.0 if pending else reward + 0.0
        yield _SMALL.pack(prompt, response, version, last, pending, given, advantage + 0.0, rewards) + reason.encode()


@dataclass(slots=True)
class _Table:
    """steps: None where the log alone has them. live: the rows that are needed, by their number in the request: where
    each is in `steps`."""

    steps: Steps | None
    live: dict[int, int]

    @property
    def is_sparse(self) -> bool:
        return self.steps is not None and 2 * len(self.live) <= len(self.steps)


class PickedRow(NamedTuple):
    """A row, the table that it is in, and its place there. steps: None where the log has to be asked. tag: of its
    group."""

    table: int
    steps: Steps | None
    at: int
    row: StoredRow
    tag: str = ""


class RowBuffer:
    """Rows by reference. A table goes when the last of its rows is released; one that only the heap holds shrinks
    before that. compacts: whether they do."""

    def __init__(self, compacts: bool) -> None:
        self._tables: dict[int, _Table] = {}
        self._compacts = compacts
        self._sparse: set[int] = set()
        self._empty: list[int] = []

    def __len__(self) -> int:
        """Rows of all tables that are held, needed or not."""
        return sum(len(table.live if table.steps is None else table.steps) for table in self._tables.values())

    def add(self, number: int, steps: Steps | None, rows: Iterable[int]) -> None:
        """Keeps a request's table, of which these rows are referenced."""
        added = self._tables[number] = _Table(steps, {row: row for row in rows})
        if added.is_sparse:
            self._sparse.add(number)

    def release(self, refs: Iterable[RowRef]) -> None:
        for ref in refs:
            table = self._tables[ref.table]
            del table.live[ref.row]
            if not table.live:
                self.drop(ref.table)
                self._empty.append(ref.table)
            elif table.is_sparse:
                self._sparse.add(ref.table)

    def tokens(self, refs: Iterable[RowRef]) -> int:
        """Of these rows, as far as their tables are held here."""
        total = 0
        for ref in refs:
            if ref.row == COLUMNS:
                continue
            table = self._tables[ref.table]
            if table.steps is not None:
                total += int(table.steps.tokens.lengths[table.live[ref.row]])
        return total

    def drop(self, number: int) -> None:
        """Holds the table no more."""
        del self._tables[number]
        self._sparse.discard(number)

    def unload(self, refs: Iterable[RowRef]) -> None:
        """Leaves the tables of these rows to the log."""
        for number in {ref.table for ref in refs}:
            table = self._tables[number]
            table.steps, table.live = None, {row: row for row in table.live}
            self._sparse.discard(number)

    def pick(self, rows: Iterable[StoredRow]) -> list[PickedRow]:
        """What `gather` needs, to be read after the lock is given back."""
        found = []
        for row in rows:
            table = self._tables[row.ref.table]
            found.append(PickedRow(row.ref.table, table.steps, table.live[row.ref.row], row))
        return found

    def table(self, number: int) -> Steps | None:
        """A table that is held; None where the log has to be asked."""
        return self._tables[number].steps

    def take_empty(self) -> list[int]:
        """Tables that are needed no more since this was last asked."""
        empty, self._empty = self._empty, []
        return empty

    def take_sparse(self) -> list[tuple[int, Steps, dict[int, int]]]:
        """Tables at most half of which is needed, so that they hold more memory than is accounted for."""
        if not self._compacts:
            return []
        sparse, self._sparse = self._sparse, set()
        return [
            (number, table.steps, dict(table.live))
            for number in sparse
            if (table := self._tables.get(number)) and table.steps is not None
        ]

    def replace(self, number: int, before: Steps, after: Steps, index: dict[int, int]) -> None:
        """Holds `after` in place of `before`, unless that is gone meanwhile. index: where each row is in it."""
        table = self._tables.get(number)
        if table is not None and table.steps is before:
            table.steps, table.live = after, {row: index[row] for row in table.live}


def compacted(steps: Steps, live: dict[int, int]) -> tuple[Steps, dict[int, int]]:
    """A copy of these rows of the table alone, and where each of them is in it."""
    table = steps.take(np.fromiter(live.values(), np.int64, len(live)))
    copies: dict[str, Any] = {
        field.name: _copied(column)
        for field in fields(table)
        if isinstance(column := getattr(table, field.name), Ragged)
    }
    copies["extras"] = {name: Extra(_copied(extra.values), extra.given) for name, extra in table.extras.items()}
    return replace(table, **copies), {row: index for index, row in enumerate(live)}


def _copied(column: Ragged) -> Ragged:
    return Ragged.from_arrays(column.arrays(), column.values.dtype)


def gather(picked: Sequence[PickedRow], token_rewards: bool, load: Callable[[int], Steps]) -> Steps:
    """The rows as one table, in this order, with the rewards that came later and their groups' tags. Token data is
    copied once.

    load: gives a table, by its number, that nobody holds.
    """
    places: dict[int, list[int]] = {}
    for position, one in enumerate(picked):
        places.setdefault(one.table, []).append(position)
    parts = []
    for number, positions in places.items():
        steps = picked[positions[0]].steps
        part = (load(number) if steps is None else steps).take(np.array([picked[at].at for at in positions], np.int64))
        parts.append(_with_rewards(part, [picked[at].row for at in positions], token_rewards))
    order = np.empty(len(picked), np.int64)
    order[[position for positions in places.values() for position in positions]] = np.arange(len(picked))
    tags = [one.tag for one in picked]
    return replace(concat(parts).take(order), tags=tags if any(tags) else None)


def _with_rewards(part: Steps, rows: Sequence[StoredRow], token_rewards: bool) -> Steps:
    """Rows of one request. Which have rewards per token, and which wait for them, differs between requests."""
    return replace(
        part,
        rewards=np.array([row.reward for row in rows], np.float64),
        rewards_pending=np.zeros(len(rows), np.bool_),
        token_rewards=_token_rewards(part, rows) if token_rewards else None,
    )


def _token_rewards(part: Steps, rows: Sequence[StoredRow]) -> Ragged:
    sent = part.token_rewards
    if sent is not None and not any(row.late_rewards for row in rows):
        return sent if sent.values.dtype == np.float64 else Ragged.from_arrays(sent.arrays(), np.float64)
    values: list[Array] = []
    for at, row in enumerate(rows):
        if row.late_rewards:
            values.append(np.frombuffer(row.late_rewards, np.float64))
        else:
            assert sent is not None, "a row without a later reward brought its own"
            values.append(sent[at])
    return Ragged.from_arrays(values, np.float64)
