"""`make bench`: every figure, as a table, in build/bench.json and as a plot. Exit code 1 when one is not reached.

`python -m tests.tools.bench submit pulls` measures these only and leaves the other figures as they were measured
before.
"""

from __future__ import annotations

import sys
from types import ModuleType

from rich.console import Console
from rich.table import Table

from tests.tools.bench import (
    balance,
    columns,
    crowd,
    formats,
    hostile,
    journal,
    lists,
    metrics,
    neighbours,
    once,
    page,
    pipeline,
    plot,
    pulls,
    record,
    redis,
    replicas,
    seals,
    secured,
    serving,
    stalls,
    submit,
    takeover,
    tree,
    turns,
    wakes,
    writeback,
)
from tests.tools.bench.figures import OUTPUT, Figure, merge, read, write

SOURCES = (
    pipeline,
    columns,
    balance,
    submit,
    turns,
    serving,
    pulls,
    wakes,
    writeback,
    crowd,
    redis,
    journal,
    takeover,
    tree,
    once,
    lists,
    seals,
    replicas,
    secured,
    page,
    metrics,
    neighbours,
    hostile,
    stalls,
    record,
)
ELSEWHERE = ("peers", "chaos", "adapters_trl", "adapters_skyrl")
"""Measured by `make bench-peers`, `make bench-trl`, `make bench-skyrl` and `python -m tests.tools.chaos.deletions`; a
run of all figures leaves them."""


def main(names: list[str]) -> int:
    sources = {_name(source): source for source in SOURCES}
    if unknown := [name for name in names if name not in sources]:
        print(f"no such figures: {', '.join(unknown)}; there are {', '.join(sources)}", file=sys.stderr)
        return 2
    if not names:
        write({name: entry for name, entry in read().items() if entry.get("source") in ELSEWHERE})
    return measured({name: sources[name] for name in names or sources})


def measured(sources: dict[str, ModuleType]) -> int:
    """Measures, prints, and gives the exit code."""
    console = Console(width=None if sys.stdout.isatty() else 130)
    figures: list[Figure] = []
    with console.status("measuring") as status:
        for name, source in sources.items():
            of_source: list[Figure] = []
            for figure in source.figures():
                of_source.append(figure)
                status.update(f"measured {figure.name}")
                merge(name, of_source)
            figures += of_source
    plot.reached()
    console.print(_table(figures))
    console.print(f"written to {OUTPUT} and {plot.REACHED}")
    return 0 if all(figure.ok for figure in figures) else 1


def _name(source: ModuleType) -> str:
    return source.__name__.rpartition(".")[2]


def _table(figures: list[Figure]) -> Table:
    table = Table(box=None, header_style="bold")
    for name in ("figure", "ours", "bound in this run", "ratio", "reach", ""):
        table.add_column(name, justify="left" if name in ("figure", "") else "right")
    for figure in figures:
        verdict = "" if figure.reach is None else "[green]ok[/]" if figure.ok else "[red]missed[/]"
        cells = (formats.ours(figure), formats.bound(figure), formats.ratio(figure), formats.reach(figure))
        table.add_row(figure.name, *cells, verdict)
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
