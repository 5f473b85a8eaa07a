"""Random runs with every filter: what becomes of them, and of the same with their requests cut at random. Exit code 1
where that differs.

`python -m tests.tools.fuzz.cut_requests --runs 5000 --seed 7` draws other ones.
"""

from __future__ import annotations

import argparse
import sys

from tests.run.cut_requests import of_both


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.fuzz.cut_requests", description=__doc__)
    parser.add_argument("--runs", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0, help="Of the first run.")
    options = parser.parse_args()
    batches = drops = differences = 0
    for seed in range(options.seed, options.seed + options.runs):
        whole, in_pieces = of_both(seed)
        batches, drops = batches + len(whole[0]), drops + len(whole[1])
        if whole != in_pieces:
            differences += 1
            print(f"seed {seed}:\n  whole: {whole}\n  cut:   {in_pieces}", flush=True)
    print(f"{options.runs} runs, {batches} batches, {drops} groups dropped, {differences} differences")
    return int(differences > 0)


if __name__ == "__main__":
    sys.exit(main())
