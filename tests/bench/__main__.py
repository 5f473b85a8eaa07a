"""`make bench`: every figure, as a table and in build/bench.json. Exit code 1 when one is not reached."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from tests.bench import balance, journal, pipeline, pulls, redis, replicas, serving, takeover
from tests.bench.figures import OUTPUT, Figure, write

SOURCES = (pipeline, balance, serving, pulls, redis, journal, takeover, replicas)


def main() -> int:
    console = Console(width=None if sys.stdout.isatty() else 110)
    found: list[Figure] = []
    with console.status("measuring") as status:
        for source in SOURCES:
            for figure in source.figures():
                found.append(figure)
                status.update(f"measured {figure.name}")
                write(found)
    console.print(_table(found))
    console.print(f"written to {OUTPUT}")
    return 0 if all(figure.ok for figure in found) else 1


def _table(found: list[Figure]) -> Table:
    table = Table(box=None, header_style="bold")
    for name in ("figure", "value", "reach", "bound in this run", ""):
        table.add_column(name, justify="left" if name in ("figure", "") else "right")
    for figure in found:
        bound = "" if figure.bound is None else f"{figure.bound:,.2f} {figure.bound_unit}"
        reach = "" if figure.reach is None else f"{'≤' if figure.at_most else '≥'} {figure.reach:g}"
        verdict = "" if figure.reach is None else "[green]ok[/]" if figure.ok else "[red]missed[/]"
        table.add_row(figure.name, f"{figure.value:,.2f} {figure.unit}", reach, bound, verdict)
    return table


if __name__ == "__main__":
    sys.exit(main())
