"""How the pipeline's time grows, arrays in to shards in shared memory: over rows, over tokens of a row, over ranks.

Each curve is a list of (x, seconds), the least of a few passes; linear in rows and tokens, flat in ranks but for what a
shard costs. `python -m tests.bench.curves` prints them.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from gristmill.steps import check
from gristmill_service.pipeline import mill
from gristmill_service.store.writing import write_shards
from tests.bench.figures import seconds
from tests.bench.pipeline import TMPFS
from tests.bench.workloads import DP_SIZE, Workload, uniform

Curve = list[tuple[int, float]]

ROWS = tuple(1024 << step for step in range(7))
LENGTHS = tuple(64 << step for step in range(11))
RANKS = tuple(1 << step for step in range(7))
SHORT = 256
_ROUNDS = 5


def over_rows(merge: str = "none") -> Curve:
    """1k to 64k rows of 256 tokens."""
    return [(rows, _least(uniform(rows, SHORT), merge)) for rows in ROWS]


def over_tokens(merge: str = "none") -> Curve:
    """128 rows of 64 to 64k tokens; x is the tokens of a row."""
    return [(length, _least(uniform(128, length), merge)) for length in LENGTHS]


def over_ranks(merge: str = "none") -> Curve:
    """The same 4k rows of 256 tokens for 1 to 64 data-parallel ranks, so that there are 4 to 256 shards."""
    work = uniform(4096, SHORT)
    return [(dp_size, _least(work, merge, dp_size)) for dp_size in RANKS]


CURVES: dict[str, Callable[[], Curve]] = {"rows": over_rows, "tokens": over_tokens, "ranks": over_ranks}


def _least(work: Workload, merge: str, dp_size: int = DP_SIZE) -> float:
    """Seconds of one pass, removal of what it wrote not included."""
    config = work.config(merge, dp_size)
    with tempfile.TemporaryDirectory(dir=TMPFS) as directory:
        target = Path(directory) / "batch"

        def once() -> None:
            batch = mill(check(work.steps), config, run="bench", batch=0)
            target.mkdir()
            write_shards(target, batch.shards)

        def timed() -> float:
            try:
                return seconds(once)
            finally:
                shutil.rmtree(target, ignore_errors=True)

        return min(timed() for _ in range(_ROUNDS))


def main() -> None:
    for name, curve in CURVES.items():
        for x, found in curve():
            print(f"{name:8} {x:8,} {1e3 * found:10.2f} ms")


if __name__ == "__main__":
    main()
