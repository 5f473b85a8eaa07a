"""A client's copy of the columns that the run declares. The run may be deleted and created again with other columns."""

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

    shared: names of columns whose values a step may omit if the previous step has them. covered: names of partial
    columns for which a merged row keeps the first value of each token, so that later values need not be sent.
    """

    columns: Sequence[ColumnSpec] = ()
    shared: frozenset[str] = frozenset()
    covered: frozenset[str] = frozenset()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Declared:
        columns = specs_of(config.get("columns", ()))
        # If a step is not merged with the step that it extends, its row needs all values itself.
        merge = "none" if any(column.merge == "equal" for column in columns) else config.get("merge", "none")
        shared = (column.name for column in columns if merge != "none" and column.is_shared)
        # In a tree, a step may extend another step than the previous one.
        of_first = (column for column in columns if column.partial and column.takes_first and not column.is_ragged)
        covered = (column.name for column in of_first if merge == "prefix")
        return cls(columns, frozenset(shared), frozenset(covered))

    def fit(self, column_names: Collection[str]) -> bool:
        """Returns whether a row may have exactly these columns."""
        names = {column.name for column in row_columns(self.columns)}
        needed = {column.name for column in self.columns if column.required and column.source == "rollout"}
        return needed <= set(column_names) <= names


class DeclaredColumns:
    """Requests the run's declared columns when rows have columns, and again when rows do not fit them. A worker without
    columns does not wait for the service.

    ask: returns the run's state. share: called with the names of shared columns.
    """

    def __init__(self, ask: Callable[[], Awaitable[RunStatus]], share: Callable[[frozenset[str]], None]) -> None:
        self._ask, self._share = ask, share
        self._known: Declared | None = None
        self._was_refused = False

    async def used(self, column_names: Collection[str], make: Callable[[Declared], T]) -> T:
        """Calls `make` with the declared columns and returns its result. If `make` refuses the rows, and the run has
        other columns by now, calls `make` again with them.

        column_names: the columns of the rows.
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
        """Reads the columns from the configuration with which the run was created."""
        self._know(Declared.of(config))

    def deleted(self) -> None:
        """Forgets the columns, because a later run of this name may declare others."""
        self._know(Declared())
        self._known = None

    async def _changed_from(self, before: Declared) -> Declared | None:
        """Requests the columns again. Returns None if they are unchanged, or the request failed."""
        with suppress(GristmillError):
            declared = await self._asked()
            return None if declared == before else declared
        return None

    def forget_if_refused(self, error: GristmillError) -> None:
        """Forgets the columns if the service refused rows: the columns may be of an earlier run of this name."""
        if isinstance(error, InvalidArgumentError):
            self._known, self._was_refused = None, True

    async def _asked(self) -> Declared:
        return self._know(Declared.of((await self._ask()).config))

    def _know(self, declared: Declared) -> Declared:
        self._known = declared
        self._share(declared.shared)
        return declared


def checked_names(columns: Any, where: object) -> Mapping[str, Any]:
    """Returns a step's columns as a mapping from names to values. Raises InvalidArgumentError for another type."""
    if columns is None:
        return {}
    if not isinstance(columns, Mapping):
        raise InvalidArgumentError(
            f"{where}: columns is a {type(columns).__name__}; pass a mapping from column names to values"
        )
    return columns
