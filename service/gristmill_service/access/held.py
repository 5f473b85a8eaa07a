"""How much a run, or all runs of a caller, hold, and may: whatever memory would allow."""

from __future__ import annotations

from typing import NamedTuple


class Held(NamedTuple):
    """groups: prompt groups that are open or in a batch that is not freed. rows: their rows. row_bytes: what these take
    as they are held."""

    groups: int = 0
    rows: int = 0
    row_bytes: int = 0

    def with_more(self, other: Held) -> Held:
        return Held(self.groups + other.groups, self.rows + other.rows, self.row_bytes + other.row_bytes)


class Most(NamedTuple):
    """The same as limits; None: any number."""

    groups: int | None = None
    rows: int | None = None
    row_bytes: int | None = None


NOTHING, ANY = Held(), Most()


class Quota(NamedTuple):
    """whose: of what it is told, and that it holds, for a person: "run 'a' holds". setting: the name of what sets it,
    with {} in place of `groups`, `rows` or `row_bytes`. is_of_run: whether it is one run's."""

    held: Held
    most: Most
    whose: str
    setting: str
    is_of_run: bool
