"""Checks that no key of a framework's data is dropped silently."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gristmill.errors import InvalidArgumentError

Row = dict[str, Any]


@dataclass(frozen=True)
class Choice:
    """The caller's choice for keys that are not fields of a row: convert them to columns, or ignore them."""

    columns: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    @classmethod
    def of(cls, columns: Iterable[str], ignore: Iterable[str] = ()) -> Choice:
        for name, names in (("columns", columns), ("ignore", ignore)):
            if isinstance(names, str):
                raise InvalidArgumentError(f"{name} is the string {names!r}; pass a list of names")
        return cls(tuple(columns), tuple(ignore))


def remedy_of(name: str) -> str:
    return f"declare it as a column of the run and pass columns=[{name!r}], or pass ignore=[{name!r}]"


@dataclass(frozen=True)
class Keys:
    """The keys of one framework's rollouts.

    what: the name of the data in error messages.
    fields: keys that become fields of the row.
    ignored: keys that are not part of a row, with the reason.
    needed: keys that training may need, with a description.
    """

    what: str
    fields: frozenset[str]
    ignored: Mapping[str, str]
    needed: Mapping[str, str]

    def check(self, present: Iterable[str], choice: Choice, remedy: str | None = None) -> None:
        """Refuse keys that are neither known nor chosen, and columns that are missing. present: keys with a value."""
        present = set(present)
        for name in sorted(present - self.fields - self.ignored.keys() - {*choice.columns, *choice.ignore}):
            kind = f"{name} ({self.needed[name]}) is not a row field" if name in self.needed else f"unknown key {name}"
            raise InvalidArgumentError(f"{self.what}: {kind}; {remedy or remedy_of(name)}")
        for name in choice.columns:
            if name not in present:
                raise InvalidArgumentError(f"{self.what}: columns contains {name}, which the data lacks; omit it")
            if name in self.fields:
                raise InvalidArgumentError(f"{self.what}: columns contains {name}, which is a field of rows; omit it")
