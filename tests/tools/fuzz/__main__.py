"""`make fuzz`: every target for so long, its findings in the corpus, the counts printed. Exit code 1 where there are
findings.

`python -m tests.tools.fuzz --seconds 600 --seed 7 deltas events` gives these targets ten minutes each, from another
seed.
"""

from __future__ import annotations

import argparse
import logging
import sys

import structlog

from tests.tools.fuzz import operations
from tests.tools.fuzz.campaign import keep, run
from tests.tools.fuzz.targets import all_targets

_OPERATIONS = "operations"


def main() -> int:
    targets = all_targets()
    parser = argparse.ArgumentParser(description="Fuzz what reads bytes of others.")
    names = [*targets, _OPERATIONS]
    parser.add_argument("targets", nargs="*", choices=[*names, []], help="Which; all by default.")
    parser.add_argument("--seconds", type=float, default=60.0, help="Of each target.")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    total, has_findings = 0, False
    for name in options.targets or names:
        if name == _OPERATIONS:
            # What is found there is reported with the request, for curl.
            outcome = operations.run(options.seed, examples=50, seconds=options.seconds)
        else:
            outcome = run(targets[name], options.seed, seconds=options.seconds)
            keep(outcome)
        total, has_findings = total + outcome.inputs, has_findings or bool(outcome.findings)
        print(f"{name}: {outcome.inputs} inputs, {outcome.taken} taken, longest {outcome.longest_s:.3f} s", flush=True)
        for place, data in outcome.findings.items():
            print(f"  {place} ({len(data)} bytes)", flush=True)
    print(f"{total} inputs in all", flush=True)
    return 1 if has_findings else 0


if __name__ == "__main__":
    sys.exit(main())
