"""The columns that a run declares, as its workers know them. The run may be deleted and created again with others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from gristmill._client.run_status import RunStatus
from gristmill._wire.column_spec import ColumnSpec, by_name, specs_of
from gristmill.errors import GristmillError, InvalidArgumentError

T = TypeVar("T")


class Declared(NamedTuple):
    """columns: those that a run declares. shared: the names of those whose values a step has from the step before."""

    columns: Sequence[ColumnSpec] = ()
    shared: frozenset[str] = frozenset()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Declared:
        columns = specs_of(config.get("columns", ()))
        # Steps that do not merge, though one begins with the other, are rows with all of their own values.
        merges = config.get("merge", "none") != "none" and all(column.merge != "equal" for column in columns)
        return cls(columns, frozenset(column.name for column in columns if merges and column.is_shared))

    def fit(self, given: Collection[str]) -> bool:
        """Whether rows may have these columns."""
        names = {column.name for column in self.columns}
        needed = {column.name for column in self.columns if column.required and column.source == "rollout"}
        return needed <= set(given) <= names

    def named(self, names: Collection[str]) -> list[ColumnSpec]:
        """The columns of these names. Raises InvalidArgumentError for one that the run does not declare."""
        known = by_name(self.columns)
        for name in names:
            if name not in known:
                raise InvalidArgumentError(
                    f"unknown field {name}; the run declares {', '.join(known) or 'none'}; declare it as a column"
                )
        return [known[name] for name in names]


class DeclaredColumns:
    """Asks for them where rows have any, once, and again where rows do not fit them: who did not create the run and has
    no columns need not wait for the service.

    ask: gives the run's state. share: is told the names of the shared ones.
    """

    def __init__(self, ask: Callable[[], Awaitable[RunStatus]], share: Callable[[frozenset[str]], None]) -> None:
        self._ask, self._share = ask, share
        self._known: Declared | None = None
        self._was_refused = False

    async def used(self, given: Collection[str], make: Callable[[Declared], T]) -> T:
        """What `make` makes of rows with these columns, given what is declared. What it refuses is made again where the
        run declares others by now. given: the names."""
        declared = await self._of(given)
        try:
            return make(declared)
        except InvalidArgumentError:
            changed = await self._changed_from(declared) if given else None
            if changed is None:
                raise
        return make(changed)

    async def _of(self, given: Collection[str]) -> Declared:
        if self._known is None and not given and not self._was_refused:
            return Declared()
        if self._known is None or not self._known.fit(given):
            return await self._asked()
        return self._known

    def created(self, config: Mapping[str, Any]) -> None:
        """The run has this configuration, which the service has taken."""
        self._know(Declared.of(config))

    def deleted(self) -> None:
        """The run is gone; another of its name may declare others."""
        self._know(Declared())
        self._known = None

    async def _changed_from(self, before: Declared) -> Declared | None:
        """None where they have not changed, or cannot be had."""
        with suppress(GristmillError):
            declared = await self._asked()
            return None if declared == before else declared
        return None

    def forget_if_refused(self, error: GristmillError) -> None:
        """What the service refuses may be right for the run of that name before, or lack a column."""
        if isinstance(error, InvalidArgumentError):
            self._known, self._was_refused = None, True

    async def _asked(self) -> Declared:
        return self._know(Declared.of((await self._ask()).config))

    def _know(self, declared: Declared) -> Declared:
        self._known = declared
        self._share(declared.shared)
        return declared


def checked_names(columns: Any, where: object) -> Mapping[str, Any]:
    """A step's columns, which are values by names. Raises InvalidArgumentError for what is no mapping."""
    if columns is None:
        return {}
    if not isinstance(columns, Mapping):
        raise InvalidArgumentError(
            f"{where}: columns is a {type(columns).__name__}; give a mapping from the columns' names to their values"
        )
    return columns
