"""`make chaos`: kills and faults while a run trains, and the proof that nothing accepted was lost or trained twice."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.tools.chaos.campaign import Report, run_campaign
from tests.tools.chaos.failovers import MODES
from tests.tools.chaos.kinds import KINDS

_console = Console(stderr=True, highlight=False)


def main() -> int:
    asked = _arguments()
    try:
        campaigns = [*product(_chosen(asked.modes, MODES), _chosen(asked.kinds, KINDS))]
    except ValueError as error:
        _console.print(str(error))
        return 2
    reports = []
    for number, (mode, kind) in enumerate(campaigns):
        reports.append(_campaign(mode, kind, share(asked.faults, len(campaigns), number), asked.seed, asked.keep))
        _write(asked.out, reports[-1])
    _print(reports)
    return 0 if all(report.is_clean for report in reports) else 1


def _chosen(asked: str, known: Iterable[str]) -> list[str]:
    """The names asked for; all that are known where none is. Raises ValueError for another one."""
    chosen = asked.split(",") if asked else list(known)
    if unknown := [name for name in chosen if name not in known]:
        raise ValueError(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
    return chosen


def _campaign(mode: str, kind: str, faults: int, seed: int, keep: bool) -> Report:
    with Progress(
        TextColumn("{task.description:>25}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[doing]}"),
        TimeElapsedColumn(),
        console=_console,
    ) as progress:
        task = progress.add_task(f"{mode}, {kind}", total=faults, doing="")

        def tell(report: Report, doing: str) -> None:
            progress.update(task, completed=report.by_kind.total(), doing=doing)

        return run_campaign(mode, faults, seed, kind=kind, keep=keep, tell=tell)


def share(faults: int, campaigns: int, number: int) -> int:
    """Counts the faults of this campaign, so that all together have them all."""
    return faults // campaigns + (number < faults % campaigns)


def _write(path: Path, report: Report) -> None:
    """Next to the file's results of the other campaigns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(document | {report.name: report.document()}, indent=2) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.chaos",
        description=__doc__,
        epilog="Exit status 1 when anything was lost and not reported, trained twice, out of order, skipped, wrong or "
        "left over, when another run was hurt, or when a process had no answer for 30 s.",
    )
    parser.add_argument("--modes", default="", help=f"some of {','.join(MODES)} (default: all)")
    parser.add_argument("--kinds", default="", help=f"of run, some of {','.join(KINDS)} (default: all)")
    parser.add_argument("--faults", type=int, default=1000, help="how many, in all campaigns together (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed has the same contents and kinds of faults")
    parser.add_argument("--out", type=Path, default=Path("build/chaos.json"), help="where the figures go")
    parser.add_argument("--keep", action="store_true", help="keep the logs also when all is well")
    return parser.parse_args()


def _print(reports: list[Report]) -> None:
    """A line a count, a column a campaign."""
    table = Table("", *(report.name for report in reports))
    documents = [report.document() for report in reports]
    for name in documents[0]:
        if not isinstance(documents[0][name], dict):
            table.add_row(name.replace("_", " "), *(str(document[name]) for document in documents))
    Console().print(table)
    for report in reports:
        for line in report.findings[:10]:
            _console.print(f"[red]{report.name}:[/] {line}")
        if report.findings:
            _console.print(f"{report.name}: {len(report.findings)} findings; the logs are in {report.directory}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
