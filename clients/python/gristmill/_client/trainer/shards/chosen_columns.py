"""The declared columns that a trainer reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gristmill._wire.column_spec import LOSS_WEIGHT, ColumnSpec, by_name, tensor_names
from gristmill.errors import InvalidArgumentError

if TYPE_CHECKING:
    from gristmill._torch.shard_files import Tensors


class ChosenColumns:
    """Selects the columns that a trainer reads.

    names: the columns to read; None: all. written: the declared columns that trainers write, by name.
    """

    def __init__(self, run: str, names: Sequence[str] | None) -> None:
        self.written: dict[str, ColumnSpec] = {}
        self._run, self._names = run, None if names is None else tuple(names)
        self._unwanted: frozenset[str] = frozenset()

    def declare(self, columns: Sequence[ColumnSpec]) -> None:
        """Set the run's declared columns. Raises InvalidArgumentError if a column to read is not declared."""
        self.written = by_name(column for column in columns if column.source == "trainer")
        if self._names is None:
            return
        declared = by_name(columns)
        # A shard may have weights that no row has (`observation_weight`).
        if unknown := [name for name in self._names if name not in declared and name != LOSS_WEIGHT]:
            raise InvalidArgumentError(
                f"run {self._run!r}: columns contains {unknown[0]!r}, but the run declares "
                f"{', '.join(declared) or 'none'}; pass only declared columns"
            )
        others = (column for column in columns if column.name not in self._names)
        unwanted = {name for column in others for name in tensor_names(column)} | {LOSS_WEIGHT}
        self._unwanted = frozenset(unwanted.difference(self._names))

    def of(self, is_forward: bool) -> Sequence[str] | None:
        """Return the columns to request for a shard; None: all. A forward shard does not have the columns that trainers
        write."""
        if self._names is None or not is_forward:
            return self._names
        return [name for name in self._names if name not in self.written]

    def among(self, tensors: Tensors) -> Tensors:
        """Return the tensors without the tensors of unwanted columns."""
        return {name: raw for name, raw in tensors.items() if name.rpartition("/")[2] not in self._unwanted}
