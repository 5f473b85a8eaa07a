"""The columns that a run declares, as far as its workers know. A run may be deleted and created again with others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from gristmill._client.run_status import RunStatus
from gristmill._wire.column_spec import ColumnSpec, row_columns, specs_of
from gristmill.errors import GristmillError, InvalidArgumentError

T = TypeVar("T")


class Declared(NamedTuple):
    """The columns that a run declares.

    shared: the names of those whose values a step may omit because the step before has them. covered: the names of
    partial ones of which a merged row has the first value of a token, so that later ones need not be sent.
    """

    columns: Sequence[ColumnSpec] = ()
    shared: frozenset[str] = frozenset()
    covered: frozenset[str] = frozenset()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Declared:
        columns = specs_of(config.get("columns", ()))
        # If a step does not merge with a step that it extends, its row needs all values itself.
        merge = "none" if any(column.merge == "equal" for column in columns) else config.get("merge", "none")
        shared = (column.name for column in columns if merge != "none" and column.is_shared)
        # In a tree, a step may join another than the one before.
        of_first = (column for column in columns if column.partial and column.takes_first and not column.is_ragged)
        covered = (column.name for column in of_first if merge == "prefix")
        return cls(columns, frozenset(shared), frozenset(covered))

    def fit(self, column_names: Collection[str]) -> bool:
        """Returns whether a row may have exactly these columns."""
        names = {column.name for column in row_columns(self.columns)}
        needed = {column.name for column in self.columns if column.required and column.source == "rollout"}
        return needed <= set(column_names) <= names


class DeclaredColumns:
    """Reads the run's declared columns when rows have any, and again when rows do not fit them: a worker that has no
    columns and did not create the run need not wait for the service.

    ask: returns the run's state. share: called with the names of shared columns.
    """

    def __init__(self, ask: Callable[[], Awaitable[RunStatus]], share: Callable[[frozenset[str]], None]) -> None:
        self._ask, self._share = ask, share
        self._known: Declared | None = None
        self._was_refused = False

    async def used(self, column_names: Collection[str], make: Callable[[Declared], T]) -> T:
        """Calls `make` with the declared columns and returns its result. If `make` refuses the rows, it is called again
        if the run has other columns by now.

        column_names: those of the rows.
        """
        declared = await self._of(column_names)
        try:
            return make(declared)
        except InvalidArgumentError:
            changed = await self._changed_from(declared) if column_names else None
            if changed is None:
                raise
        return make(changed)

    async def _of(self, column_names: Collection[str]) -> Declared:
        if self._known is None and not column_names and not self._was_refused:
            return Declared()
        if self._known is None or not self._known.fit(column_names):
            return await self._asked()
        return self._known

    def created(self, config: Mapping[str, Any]) -> None:
        """Takes the columns from a configuration with which the run was created."""
        self._know(Declared.of(config))

    def deleted(self) -> None:
        """Forgets the columns: another run of the name may declare others."""
        self._know(Declared())
        self._known = None

    async def _changed_from(self, before: Declared) -> Declared | None:
        """Reads the columns again. Returns None if they are the same, or cannot be read."""
        with suppress(GristmillError):
            declared = await self._asked()
            return None if declared == before else declared
        return None

    def forget_if_refused(self, error: GristmillError) -> None:
        """Forgets the columns if the service refused rows: they may be those of an earlier run of the name."""
        if isinstance(error, InvalidArgumentError):
            self._known, self._was_refused = None, True

    async def _asked(self) -> Declared:
        return self._know(Declared.of((await self._ask()).config))

    def _know(self, declared: Declared) -> Declared:
        self._known = declared
        self._share(declared.shared)
        return declared


def checked_names(columns: Any, where: object) -> Mapping[str, Any]:
    """Returns a step's columns, values by name. Raises InvalidArgumentError unless they are a mapping."""
    if columns is None:
        return {}
    if not isinstance(columns, Mapping):
        raise InvalidArgumentError(
            f"{where}: columns is a {type(columns).__name__}; give a mapping from the columns' names to their values"
        )
    return columns
