"""The figures of batches that a run's log keeps after their rows and shards are freed.

Beyond `MOST` records, neighbors are added up in pairs, so that a run of any length keeps at most `MOST` records and
exact totals.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from itertools import pairwise

from gristmill_service.pipeline.figures import Figures

MOST = 1024


def keep(records: list[Figures], record: Figures) -> None:
    """Appends the record. Beyond `MOST` records, joins them in pairs; then all records but the last cover the same
    number of batches."""
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
