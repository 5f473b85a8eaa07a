"""A mapping of closed groups, of which a run may have millions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

from gristmill_service.run.machine.events import GroupKey

T = TypeVar("T")

# The entries of a part, which are encoded in well under a millisecond.
_PART = 4096


class ClosedGroups(dict[GroupKey, T]):
    """Values by group. Another thread can read the entries as they were at one time, while entries are added and
    replaced by item assignment; no entry is removed."""

    def __init__(self, groups: Mapping[GroupKey, T] | Iterable[tuple[GroupKey, T]] = ()) -> None:
        super().__init__(groups)
        # The key and value of each assignment.
        self._assigned: list[Any] = list(chain.from_iterable(self.items()))

    def __setitem__(self, key: GroupKey, value: T) -> None:
        super().__setitem__(key, value)
        self._assigned += (key, value)

    def extend(self, part: Sequence[Any]) -> None:
        """Adds the entries of a part."""
        self.update(zip(part[::2], part[1::2], strict=True))
        self._assigned += part

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)

    def parts(self) -> Iterator[list[Any]]:
        """Returns the entries so far in small parts, in each of which keys and values alternate. A replaced entry
        occurs again, later. Takes constant time."""
        end = len(self._assigned)
        return (self._assigned[at : min(at + 2 * _PART, end)] for at in range(0, end, 2 * _PART))
