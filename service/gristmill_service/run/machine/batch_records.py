"""The figures of batches that a run's log stores permanently, after rows and shards are freed.

If there are too many, neighbors are added up in pairs: a run of any length stores at most `MOST`, and its totals stay
exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from itertools import pairwise

from gristmill_service.pipeline.figures import Figures

MOST = 1024


def keep(records: list[Figures], record: Figures) -> None:
    """Appends the record. If there are too many, halves their number: all but the last then cover equally many
    batches."""
    if records and records[-1].batches < records[0].batches:
        records[-1] = records[-1].joined(record)
    else:
        records.append(record)
    if len(records) > MOST:
        paired = [one.joined(other) for one, other in list(pairwise(records))[::2]]
        records[:] = paired + records[2 * len(paired) :]


def total(records: Iterable[Figures]) -> Figures | None:
    """Returns the sum of all records; None if there is none."""
    every = list(records)
    return reduce(Figures.joined, every) if every else None
