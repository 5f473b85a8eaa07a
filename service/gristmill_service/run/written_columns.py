"""Columns that trainers write: parsed from requests, and stored as tables of the run's log."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_128

from gristmill._wire.column_spec import ColumnSpec, by_name
from gristmill._wire.columns import Array, Ragged, bytes_of
from gristmill._wire.row_fields import UNKNOWN
from gristmill._wire.steps import Extra, Steps
from gristmill.errors import InvalidArgumentError, UnavailableError
from gristmill_service.config import RunConfig
from gristmill_service.pipeline.layout.columns import safetensors_name
from gristmill_service.pipeline.scheduling.plan import ShardAddress
from gristmill_service.pipeline.written import ShardForm
from gristmill_service.run.machine.answers import ColumnPlace
from gristmill_service.run.machine.described_rows import row_digests
from gristmill_service.run.machine.events import WrittenColumn
from gristmill_service.run.machine.state import State
from gristmill_service.run.rows.checked_tables import CheckedTables
from gristmill_service.run.rows.row_buffer import RowBuffer
from gristmill_service.storage.row_tables import Stored, steps_of


class _Sent(NamedTuple):
    """A received column. tensors: by their names in a shard. digest: of the bytes of all tensors."""

    spec: ColumnSpec
    tensors: Mapping[str, Array]
    digest: bytes


class SentColumns:
    """The columns that a trainer sent for one shard.

    tensors: by their names in the shard. Raises InvalidArgumentError for a column that trainers of the run do not
        write.
    """

    def __init__(
        self, run: str, batch: int, address: ShardAddress, tensors: Mapping[str, Array], config: RunConfig
    ) -> None:
        self._where = f"run {run!r}: batch {batch} mini-batch {address.mini_batch} rank {address.rank}"
        self._address, self._config = address, config
        columns = _by_column(tensors, config.written_columns, self._where)
        self._columns = {ColumnPlace(address.mini_batch, address.rank, sent.spec.name): sent for sent in columns}

    @property
    def digests(self) -> dict[ColumnPlace, bytes]:
        return {place: sent.digest for place, sent in self._columns.items()}

    def values(
        self,
        new: Sequence[ColumnPlace],
        forms: Mapping[ShardAddress, ShardForm],
        others: Callable[[ColumnPlace], Array | None],
    ) -> dict[ColumnPlace, Array]:
        """Returns the values of the new columns. forms: the forms of the batch's shards. others: returns a column that
        was written before, or None. Reads tables and checks values: call it in a thread.

        Raises InvalidArgumentError for values that do not fit the shard.
        """
        form = forms.get(self._address)
        if not new:
            return {}
        if form is None:
            raise UnavailableError(f"{self._where}: its forward shard is being republished; retry after that")
        values = {place: self._own_values(self._columns[place], form) for place in new}
        for place, column_values in values.items():

            def other(name: str) -> Array | None:
                sibling = ColumnPlace(self._address.mini_batch, self._address.rank, name)
                return values[sibling] if sibling in values else others(sibling)

            form.rows.check(self._columns[place].spec, column_values, self._config, other, self._where)
        return values

    def described(
        self, values: Mapping[ColumnPlace, Array], numbers: Sequence[int]
    ) -> dict[ColumnPlace, WrittenColumn]:
        """Returns the columns as the state describes them. numbers: the table of each column, in order."""
        return {
            place: WrittenColumn(
                self._columns[place].digest,
                number,
                row_digests(table_of(place.column, column_values))[0],
                column_values.nbytes,
            )
            for (place, column_values), number in zip(values.items(), numbers, strict=True)
        }

    def _own_values(self, sent: _Sent, form: ShardForm) -> Array:
        names = form.names(sent.spec)
        for name in sent.tensors:
            if name not in names:
                raise InvalidArgumentError(
                    f"{self._where}: {name[:200]!r} is not a tensor of this shard; write one of {', '.join(names)}"
                )
        return form.own_values(sent.spec, sent.tensors, self._where)


Written = Mapping[ColumnPlace, tuple[int, Stored | None]]
"""For each written column, the number of its table, and the table; None if it has to be loaded from the log."""


def written_before(batch: int, state: State, rows: RowBuffer) -> Written:
    """Returns the written columns of a batch that waits for columns."""
    waiting = state.batches.get(batch)
    if waiting is None:
        return {}
    return {place: (column.table, rows.table(column.table)) for place, column in waiting.written.items()}


def loaded(written: Written, tables: CheckedTables) -> Callable[[ColumnPlace], Array | None]:
    """Returns a function that returns the values of a written column, or None. The function blocks to read the log."""

    def find(place: ColumnPlace) -> Array | None:
        if place not in written:
            return None
        number, table = written[place]
        return values_of(steps_of(tables.get(number) if table is None else table), place.column)

    return find


def table_of(name: str, values: Array) -> Steps:
    """Returns a table for these values: one row without tokens, with the column."""
    none, nothing = np.zeros(1, np.int32), np.zeros(1, np.int64)
    return Steps(
        uids=[""],
        rounds=none,
        samples=none,
        steps=none,
        attempts=none,
        is_last_steps=np.zeros(1, np.bool_),
        stop_reasons=[""],
        policy_versions=np.full(1, UNKNOWN, np.int32),
        tokens=Ragged(np.empty(0, np.int32), nothing, nothing),
        prompt_lengths=nothing,
        loss_mask=Ragged(np.empty(0, np.uint8), nothing, nothing),
        logprobs=None,
        rewards=np.zeros(1),
        token_rewards=None,
        rewards_pending=np.zeros(1, np.bool_),
        extras={name: Extra(Ragged.from_lengths(values, np.array([len(values)])), np.ones(1, np.bool_))},
    )


def values_of(table: Steps, name: str) -> Array:
    """Returns the values in a table from `table_of`."""
    return table.extras[name].values[0]


def _by_column(tensors: Mapping[str, Array], columns: Sequence[ColumnSpec], where: str) -> list[_Sent]:
    written = by_name(columns)
    by_column: dict[str, dict[str, Array]] = {}
    for name in sorted(tensors):
        column = name.rpartition("/")[2]
        if column not in written:
            known = ", ".join(written) or "none"
            raise InvalidArgumentError(
                f"{where}: {name[:200]!r} is not in a column that trainers of this run write ({known}); declare the "
                "column with source: trainer"
            )
        by_column.setdefault(column, {})[name] = tensors[name]
    if not by_column:
        raise InvalidArgumentError(f"{where}: the request contains no tensor; write at least one column")
    return [
        _Sent(written[name], tensors_of_column, _digest(tensors_of_column))
        for name, tensors_of_column in by_column.items()
    ]


def _digest(tensors: Mapping[str, Array]) -> bytes:
    digest = xxh3_128()
    for name, values in tensors.items():
        digest.update(f"{name} {safetensors_name(values.dtype)} {values.shape} ".encode())
        digest.update(bytes_of(values))
    return digest.digest()
