"""Random runs of trainers that announce, acknowledge and ask in every way, and of the adapters: who waits for ever, and
which groups begin beyond the window, or with weights that are about to be replaced. Exit code 1 where any do.

`python -m tests.tools.fuzz.pacing --runs 5000 --seed 7` draws other ones.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from tests.run.paced_runs import outcome_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.fuzz.pacing", description=__doc__)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="Of the first run.")
    options = parser.parse_args()
    kinds, counts = Counter[str](), Counter[str]()
    for seed in range(options.seed, options.seed + options.runs):
        kind, outcome = outcome_of(seed)
        kinds[kind] += 1
        found = {"deadlocks": bool(outcome.deadlock), "beyond": outcome.beyond, "replaced": outcome.replaced}
        counts.update({"trained": outcome.trained, "begun": outcome.begun, **found})
        if any(found.values()):
            print(f"seed {seed}: {kind}: {outcome}", flush=True)
    habits = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
    print(
        f"{options.runs} runs ({habits}), {counts['trained']} batches, {counts['begun']} groups: {counts['deadlocks']} "
        f"deadlocks, {counts['beyond']} groups beyond the window, {counts['replaced']} with weights to be replaced"
    )
    return int(any(counts[name] for name in ("deadlocks", "beyond", "replaced")))


if __name__ == "__main__":
    sys.exit(main())
