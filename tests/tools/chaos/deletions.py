"""Deletes a run under load for five minutes next to twenty others, on a journal, and counts the others that were hurt.

The others are checked, deleted and recreated by turns, and the remaining ones checked once more at the end.

`python -m tests.tools.chaos.deletions [--seconds 300]` writes chaos.neighbours_hurt into build/bench.json. Exit status
1 when any of the others was hurt or the service failed, also after the service was killed and has read its journal
again.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

from tests.tools.bench.figures import Figure, merge
from tests.tools.chaos.neighbours import Neighbours
from tests.tools.chaos.services import JournalMode

OTHERS = 20
_MOST_LINES = 40
SECONDS = 300.0
SOURCE = "chaos"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.chaos.deletions", description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for how long (default: 300)")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    hurt, findings, deletions = run(asked.seconds, asked.seed)
    merge(SOURCE, [Figure("chaos.neighbours_hurt", len(hurt), "runs", 0.0, deletions, "deletions under load")])
    print(f"{deletions} deletions under load, {len(hurt)} of {OTHERS} other runs hurt")
    for line in [*(f"{name}: {wrong}" for name, wrong in hurt.items()), *findings][:_MOST_LINES]:
        print(line, file=sys.stderr)
    return 1 if hurt or findings else 0


def run(seconds: float, seed: int) -> tuple[dict[str, str], list[str], int]:
    """Returns what is wrong with each run that was hurt, what the deleted one met, and how often it was deleted."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="gristmill-deletions-") as directory:
        mode = JournalMode(Path(directory), draw)
        mode.start()
        neighbours = Neighbours(mode.address, draw)
        try:
            neighbours.add(OTHERS)
            with neighbours.renewed():
                neighbours.delete_under_load(seconds)
            mode.faults["service killed"]()
            return neighbours.hurt(), neighbours.findings, neighbours.deletions
        finally:
            neighbours.close()
            mode.close()


if __name__ == "__main__":
    sys.exit(main())
