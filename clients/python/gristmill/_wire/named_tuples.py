"""Creates many named tuples from columns."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import Any, TypeVar

T = TypeVar("T", bound=tuple[Any, ...])


def made_of(kind: type[T], *columns: Iterable[Any]) -> list[T]:
    """Returns one named tuple per row, from one column per field. Calling the class takes three times as long."""
    fields: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
    assert len(columns) == len(fields), "an omitted field would not get its default"
    make: Any = tuple.__new__
    return [*map(make, repeat(kind), zip(*columns, strict=True))]
