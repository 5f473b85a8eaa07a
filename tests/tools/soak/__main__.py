"""`make soak`: does anything grow slowly? A deployment works in rounds, and each quantity's growth has a bound.

    python -m tests.tools.soak --minutes 20

Exit status 0: everything is within its bound. 1: something grows beyond it. 130: Ctrl-C or SIGTERM,
after the table so far.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.tools.soak.campaign import Plan, deployed
from tests.tools.soak.slopes import Readings, Slope, Work, slopes

_console = Console(stderr=True, highlight=False, soft_wrap=True)
# Of a table in a file or a pipe.
_WIDTH = 120
_LEAST_ROUNDS = 8
_WARM_UP_ROUNDS = 4


def main() -> int:
    asked = _arguments()
    # Its processes would go on without it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rounds, work = list[Readings](), dict[str, Work]()
    is_interrupted = False
    try:
        with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as directory:
            _soak(Path(directory), asked, rounds, work)
    except KeyboardInterrupt:
        is_interrupted = True
    if len(rounds) < 2:
        _console.print("too few rounds to tell")
        return 128 + signal.SIGINT if is_interrupted else 1
    found = slopes(rounds, work)
    _print(found, len(rounds))
    if asked.out is not None:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps([one._asdict() | {"is_within": one.is_within} for one in found], indent=1))
    if is_interrupted:
        return 128 + signal.SIGINT
    return 0 if all(one.is_within for one in found) else 1


def _soak(directory: Path, asked: argparse.Namespace, rounds: list[Readings], work: dict[str, Work]) -> None:
    """Works until the time is over. Adds the readings of each round after the warm-up, and what it made."""
    began = time.monotonic()
    end = began + 60 * asked.minutes

    def tell(text: str) -> None:
        _console.print(f"{(time.monotonic() - began) / 60:5.1f} min  {text}")

    tell("starting a service with a journal, two replicas on Redis, a recorder and clients")
    with deployed(directory, Plan(batches=asked.batches)) as deployment:
        if not asked.no_warm_up:
            tell("warming up")
            deployment.warm_up()
        count = 0
        while count < _WARM_UP_ROUNDS + _LEAST_ROUNDS or time.monotonic() < end:
            if asked.rounds is not None and count == _WARM_UP_ROUNDS + asked.rounds:
                break
            count += 1
            work.update(deployment.work())
            deployment.settle()
            readings = deployment.read()
            if count > _WARM_UP_ROUNDS:
                rounds.append(readings)
            used = ", ".join(
                f"{part} {value / 1e6:.1f} MB"
                for (part, what), value in readings.items()
                if what.endswith("bytes") and "," not in what
            )
            tell(f"round {count}: {used}")
        tell("stopping")


def _print(found: Sequence[Slope], rounds: int) -> None:
    table = Table(title=f"growth in a round, over {rounds} rounds", box=None, header_style="bold", pad_edge=False)
    for name in ("part", "quantity", "first", "last", "growth", "bound", ""):
        table.add_column(name, justify="left" if name in ("part", "quantity", "") else "right", no_wrap=True)
    for one in found:
        numbers = [f"{value:,.{0 if abs(value) >= 1000 else 2}f}" for value in one[2:]]
        table.add_row(one.part, one.quantity, *numbers, "" if one.is_within else "[red]grows[/red]")
    Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH).print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="how long to work; at least eight rounds [20]")
    parser.add_argument("--rounds", type=int, help="work for this many rounds at most, after the warm-up")
    parser.add_argument("--batches", type=int, default=Plan().batches, help="batches of each long run in a round [30]")
    parser.add_argument("--no-warm-up", action="store_true", help="begin without the batches that fill the records")
    parser.add_argument("--out", type=Path, help="a file for the table, as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
