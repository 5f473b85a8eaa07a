"""The table that a person watches while it trains: a row per batch, live on a terminal, one line each elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trainer import BatchReport

_HEADINGS = ("batch", "reward", "success", "rows received → merged", "padding", "version lag", "seconds")
_BARS = " ▁▂▃▄▅▆▇█"
_ROWS_AROUND = 10


class LiveTable:
    """The last batches as a table, and all of them as a curve."""

    def __init__(self, console: Console, batches: int) -> None:
        self._console = console
        self._batches = batches
        self._reports: list[BatchReport] = []
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def add(self, report: BatchReport) -> None:
        self._reports.append(report)
        if self._live is not None:
            self._live.update(self._view(), refresh=True)
        else:
            if len(self._reports) == 1:
                self._console.print("  ".join(_HEADINGS))
            cells = [cell.rjust(len(heading)) for cell, heading in zip(_cells(report), _HEADINGS, strict=True)]
            self._console.print("  ".join(cells))

    def _view(self) -> Group:
        shown = max(5, self._console.height - _ROWS_AROUND)
        table = Table(title=f"batch {len(self._reports)} of {self._batches}")
        for heading in _HEADINGS:
            table.add_column(heading, justify="right")
        for report in self._reports[-shown:]:
            table.add_row(*_cells(report))
        return Group(table, self._curve())

    def _curve(self) -> Text:
        """The success rate over the whole run, as wide as the console allows."""
        width = max(10, min(self._batches, self._console.width - 20))
        values = [report.success for report in self._reports]
        ends = [round((column + 1) * self._batches / width) for column in range(width)]
        starts = [0, *ends]
        parts = [values[start:end] for start, end in zip(starts, ends, strict=False) if values[start:end]]
        bars = "".join(_BARS[round(sum(part) / len(part) * (len(_BARS) - 1))] for part in parts)
        return Text(f"success  {bars}", style="green")

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


def _cells(report: BatchReport) -> list[str]:
    return [
        str(report.batch),
        f"{report.reward:+.2f}",
        f"{report.success:.0%}",
        f"{report.rows_received} → {report.rows}",
        f"{report.padding_share:.0%}",
        f"{report.lag:.1f}",
        f"{report.seconds:.2f}",
    ]
