"""`make chaos`: kills and faults while a run trains, and the proof that nothing accepted was lost or trained twice."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.chaos.campaign import Report, run_campaign
from tests.chaos.services import MODES

_console = Console(stderr=True, highlight=False)


def main() -> int:
    asked = _arguments()
    modes = list(MODES) if asked.mode == "both" else [asked.mode]
    reports = []
    for mode in modes:
        with Progress(
            TextColumn("{task.description:>8}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[doing]}"),
            TimeElapsedColumn(),
            console=_console,
        ) as progress:
            task = progress.add_task(mode, total=asked.faults, doing="")
            reports.append(
                run_campaign(
                    mode,
                    asked.faults,
                    asked.seed,
                    keep=asked.keep,
                    tell=lambda report, doing, task=task, progress=progress: progress.update(
                        task, completed=report.by_kind.total(), doing=doing
                    ),
                )
            )
        _write(asked.out, reports[-1])
    _print(reports)
    return 0 if all(report.is_clean for report in reports) else 1


def _write(path: Path, report: Report) -> None:
    """Beside what the file has of the other mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(document | {report.mode: report.document()}, indent=2) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description=__doc__,
        epilog="Exit status 1 when anything was lost, trained twice, out of order, wrong, left over, or hung 30 s.",
    )
    parser.add_argument(
        "--mode", choices=[*MODES, "both"], default="both", help="one service with a journal, or replicas"
    )
    parser.add_argument("--faults", type=int, default=250, help="how many, in each mode (default: 250)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed has the same contents and kinds of faults")
    parser.add_argument("--out", type=Path, default=Path("build/chaos.json"), help="where the figures go")
    parser.add_argument("--keep", action="store_true", help="keep the logs also when all is well")
    return parser.parse_args()


def _print(reports: list[Report]) -> None:
    names = ("faults", "rows_acknowledged", "lost", "trained_twice", "out_of_order")
    table = Table("mode", *(name.replace("_", " ") for name in names), "longest outage", "seconds")
    for report in reports:
        found = report.document()
        table.add_row(
            report.mode,
            *(str(found[name]) for name in names),
            f"{report.longest_outage_s:.1f} s",
            f"{report.seconds:.0f}",
        )
    Console().print(table)
    for report in reports:
        verdict = report.verdict
        wrong = [*verdict.lost, *verdict.trained_twice, *verdict.out_of_order, *verdict.wrong, *report.left]
        for line in wrong[:10]:
            _console.print(f"[red]{report.mode}:[/] {line}")
        if wrong:
            _console.print(f"{report.mode}: {len(wrong)} findings; the logs are in {report.directory}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
