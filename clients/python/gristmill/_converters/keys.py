"""What becomes of a framework's keys: none is lost without a word."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gristmill.errors import InvalidArgumentError

Row = dict[str, Any]


@dataclass(frozen=True)
class Choice:
    """What the caller says of keys that are no fields of a row."""

    columns: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    @classmethod
    def of(cls, columns: Iterable[str], ignore: Iterable[str] = ()) -> Choice:
        for name, names in (("columns", columns), ("ignore", ignore)):
            if isinstance(names, str):
                raise InvalidArgumentError(f"{name} is the string {names!r}; give a list of names")
        return cls(tuple(columns), tuple(ignore))


def remedy_of(name: str) -> str:
    return f"declare it as a column of the run and give columns=[{name!r}], or give ignore=[{name!r}]"


@dataclass(frozen=True)
class Keys:
    """The keys of one framework's rollouts.

    fields: those that fields of the row are made of.
    ignored: those that are no part of a row, and why.
    needed: those that training would miss, and what they hold.
    """

    what: str
    fields: frozenset[str]
    ignored: Mapping[str, str]
    needed: Mapping[str, str]

    def check(self, given: Iterable[str], choice: Choice, remedy: str | None = None) -> None:
        """Refuses what is neither known nor chosen, and columns that are not there. `given` has no absent ones."""
        given = set(given)
        for name in sorted(given - self.fields - self.ignored.keys() - {*choice.columns, *choice.ignore}):
            kind = (
                f"{name} ({self.needed[name]}) is no field of a row" if name in self.needed else f"unknown key {name}"
            )
            raise InvalidArgumentError(f"{self.what}: {kind}; {remedy or remedy_of(name)}")
        for name in choice.columns:
            if name not in given:
                raise InvalidArgumentError(f"{self.what}: columns names {name}, which is not there; leave it out")
            if name in self.fields:
                raise InvalidArgumentError(f"{self.what}: columns names {name}, which is a field of rows; leave it out")
