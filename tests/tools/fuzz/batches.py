"""Random batches against the independent reference of `tests/reference_model`. Exit code 1 where they disagree.

`python -m tests.tools.fuzz.batches --batches 10000 --seed 7` draws other ones; what disagrees is printed in its
smallest form.
"""

from __future__ import annotations

import argparse
import json
import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.reference_model.comparing import Disagreement
from tests.reference_model.drawing import drawn
from tests.reference_model.fuzz import Check, by_command, smallest


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.fuzz.batches", description=__doc__)
    parser.add_argument("--batches", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    done = number = disagreements = 0
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("Comparing batches", total=options.batches)
        while done < options.batches:
            name = f"{options.seed}/{number}"
            try:
                count = by_command(*drawn(name))
            except Exception as error:  # noqa: BLE001 - a traceback is a finding, too
                count, disagreements = 1, disagreements + 1
                print(f"{name}: {error!r}\n{_smallest(name, by_command)}", flush=True)
            done, number = done + count, number + 1
            progress.update(task, completed=done)
    print(f"{done} batches in {number} files, {disagreements} disagreements")
    return int(disagreements > 0)


def _smallest(name: str, check: Check) -> str:
    rows, config = smallest(*drawn(name), check)
    lines = [json.dumps(config), *map(json.dumps, rows)]
    try:
        check(rows, config)
    except (Disagreement, Exception) as error:  # noqa: BLE001 - a traceback is a finding, too
        lines.append(repr(error))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
