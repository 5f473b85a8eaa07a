"""Named tuples of whole columns."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import Any, TypeVar

T = TypeVar("T", bound=tuple[Any, ...])


def made_of(kind: type[T], *columns: Iterable[Any]) -> list[T]:
    """Returns named tuples, one per row, from a column for each field. Calling the class takes three times as long."""
    fields: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
    assert len(columns) == len(fields), "a field that is left out would not get its default"
    make: Any = tuple.__new__
    return [*map(make, repeat(kind), zip(*columns, strict=True))]
