"""What each quantity grows by in a round, and whether that is within its bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple

Readings = Mapping[tuple[str, str], float]
"""A round's values, by part and quantity."""


class Work(NamedTuple):
    """What a round makes, of one service. batches: of the long run. groups: that are closed in it. kept: runs that end
    and are kept. history: whether the run still gains records of its batches, of which it keeps 1,024."""

    batches: int
    groups: int
    kept: int
    history: bool


class Slope(NamedTuple):
    """part: of the deployment. first, last: the values of the first and the last round. growth: in a round. bound: of
    the growth."""

    part: str
    quantity: str
    first: float
    last: float
    growth: float
    bound: float

    @property
    def is_within(self) -> bool:
        return self.growth <= self.bound


def slope_of(values: Sequence[float]) -> float:
    """Returns the median of the slopes between all pairs, which a few odd rounds do not change (Theil and Sen)."""
    pairs = combinations(enumerate(values), 2)
    return median((later - value) / (after - at) for (at, value), (after, later) in pairs)


def slopes(rounds: Sequence[Readings], work: Mapping[str, Work]) -> list[Slope]:
    """Returns the slope of each quantity over at least two rounds. work: of each part."""
    found = []
    for part, quantity in rounds[0]:
        values = [one[part, quantity] for one in rounds]
        bound = bound_of(quantity, work[part], median(values))
        found.append(Slope(part, quantity, values[0], values[-1], slope_of(values), bound))
    return found


def bound_of(quantity: str, work: Work, usual: float) -> float:
    """Returns what the quantity may grow by in a round: what is documented, and room for noise. usual: its value."""
    records = 1_000 * work.batches if work.history else 0
    match quantity:
        case "bytes":
            # A closed group, and a kept run, as docs/operations.md has them.
            return 80_000 + 20 * work.groups + 20_000 * work.kept + records
        case "client bytes":
            # A client remembers the last 100,000 groups that it began, in a table that grows in large steps.
            return 90_000 + 160 * work.groups
        case "journal files":
            return 2 * work.kept + 0.2
        case "keys":
            return 3 * work.kept + 0.3
        case "used_memory":
            return 50_000 + 12_000 * work.kept + 100 * work.groups
        case "status, bytes" | "metrics, bytes":
            return 100 + 0.002 * usual
        case "overview, ms":
            # It reads the report of each dormant run.
            return 0.3 + 0.15 * work.kept
        case _ if quantity.endswith(", ms"):
            return max(0.5, 0.05 * usual)
        case _:
            return 0.34
