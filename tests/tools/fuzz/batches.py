"""Random batches against the independent reference of `tests/reference_model`. Exit code 1 where they disagree.

`python -m tests.tools.fuzz.batches --batches 10000 --seed 7 --through service` draws other ones, and gives them to a
service in this process; what disagrees is printed in its smallest form.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from contextlib import ExitStack, closing

import structlog
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gristmill_service.settings import Settings
from tests.on_loop import Service
from tests.reference_model.drawing import drawn
from tests.reference_model.fuzz import Check, by_command, smallest
from tests.reference_model.served import ByService
from tests.serving import FREE_PORTS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.fuzz.batches", description=__doc__)
    parser.add_argument("--batches", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--through", choices=["commands", "service"], default="commands")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with ExitStack() as opened:
        check: Check = by_command
        if options.through == "service":
            service = Service(Settings(**FREE_PORTS, store="memory", shutdown_grace_s=5))
            service.start()
            opened.callback(service.stop)
            check = opened.enter_context(closing(ByService(service.grpc_address, service.http_url)))
        return _campaign(check, options.seed, options.batches)


def _campaign(check: Check, seed: int, batches: int) -> int:
    done = number = disagreements = 0
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("Comparing batches", total=batches)
        while done < batches:
            name = f"{seed}/{number}"
            try:
                count = check(*drawn(name))
            except Exception as error:  # noqa: BLE001 - a traceback is a finding, too
                count, disagreements = 1, disagreements + 1
                print(f"{name}: {error!r}\n{_smallest(name, check)}", flush=True)
            done, number = done + count, number + 1
            progress.update(task, completed=done)
    print(f"{done} batches in {number} files, {disagreements} disagreements")
    return int(disagreements > 0)


def _smallest(name: str, check: Check) -> str:
    rows, config = smallest(*drawn(name), check)
    lines = [json.dumps(config), *map(json.dumps, rows)]
    try:
        check(rows, config)
    except Exception as error:  # noqa: BLE001 - a traceback is a finding, too
        lines.append(repr(error))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
