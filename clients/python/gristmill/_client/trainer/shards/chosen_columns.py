"""The columns that a rank wants, of those that the run declares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gristmill._wire.column_spec import ColumnSpec, by_name, tensor_names
from gristmill.errors import InvalidArgumentError

if TYPE_CHECKING:
    from gristmill._torch.shard_files import Tensors


class ChosenColumns:
    """names: of those wanted; None: all. written: those declared that trainers write, by name."""

    def __init__(self, run: str, names: Sequence[str] | None) -> None:
        self.written: dict[str, ColumnSpec] = {}
        self._run, self._names = run, None if names is None else tuple(names)
        self._unwanted: frozenset[str] = frozenset()

    def declare(self, columns: Sequence[ColumnSpec]) -> None:
        """Says what the run declares. Raises InvalidArgumentError where a column is wanted that is not among them."""
        self.written = by_name(column for column in columns if column.source == "trainer")
        if self._names is None:
            return
        declared = by_name(columns)
        if unknown := [name for name in self._names if name not in declared]:
            raise InvalidArgumentError(
                f"run {self._run!r}: columns names {unknown[0]!r}, and the run declares "
                f"{', '.join(declared) or 'none'}; name declared columns only"
            )
        others = (column for column in columns if column.name not in self._names)
        self._unwanted = frozenset(name for column in others for name in tensor_names(column))

    def of(self, is_forward: bool) -> Sequence[str] | None:
        """The names to ask a shard for; a forward shard does not have what trainers write. None: all."""
        if self._names is None or not is_forward:
            return self._names
        return [name for name in self._names if name not in self.written]

    def among(self, tensors: Tensors) -> Tensors:
        """The tensors without those of columns that are not wanted."""
        return {name: raw for name, raw in tensors.items() if name.rpartition("/")[2] not in self._unwanted}
