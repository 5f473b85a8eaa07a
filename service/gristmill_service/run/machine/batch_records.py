"""What a run's log keeps of its batches for good: figures of each, which outlive rows, shards and processes.

Where there are many, each two neighbors become one: a run of any length keeps at most `MOST`, and its totals stay
exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from itertools import pairwise

from gristmill_service.pipeline.figures import Figures

MOST = 1024


def keep(records: list[Figures], record: Figures) -> None:
    """Adds the record to those before it, and halves their number where they are too many: all but the last are of
    equally many batches."""
    if records and records[-1].batches < records[0].batches:
        records[-1] = records[-1].joined(record)
    else:
        records.append(record)
    if len(records) > MOST:
        paired = [one.joined(other) for one, other in list(pairwise(records))[::2]]
        records[:] = paired + records[2 * len(paired) :]


def total(records: Iterable[Figures]) -> Figures | None:
    """Returns one record of all; None where there is none."""
    every = list(records)
    return reduce(Figures.joined, every) if every else None
