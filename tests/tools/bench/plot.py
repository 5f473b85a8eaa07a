"""Draws what was measured: every figure against its reach, and the curves of cost.

The same numbers give the same bytes: no date, ids from a salt. Text stays text, so that files are small.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from tests.tools.bench import formats
from tests.tools.bench.figures import OUTPUT, Figure, parse, read

REACHED = OUTPUT.with_suffix(".svg")
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "gristmill",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 8,
}
OK, MISSED = "#0072b2", "#d55e00"
_LINE_INCHES = 0.19


def save(picture: Picture, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        picture.savefig(path, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight")
    # Lines of paths end in blanks, which reviews of the file would show.
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def reached() -> None:
    """Every figure that has a reach, of the last runs: left of the line it is reached. What missed is an open cross
    with its name in bold, so that it is visible in gray, too."""
    figures = [figure for figure in parse(read()) if figure.reach is not None]
    if not figures:
        return
    with matplotlib.rc_context(STYLE):
        picture = Picture(figsize=(9, 1.2 + _LINE_INCHES * len(figures)))
        axes = picture.subplots()
        for line, figure in enumerate(figures):
            _mark(axes, line, figure)
        _frame(axes, figures)
    save(picture, REACHED)


def _mark(axes: Axes, line: int, figure: Figure) -> None:
    within = figure.within or 0.0
    color = OK if figure.ok else MISSED
    axes.plot([1, within], [line, line], color=color, linewidth=1, linestyle="-" if figure.ok else ":")
    axes.plot([within], [line], color=color, marker="o" if figure.ok else "x", markersize=5, markeredgewidth=2)
    value = f"{figure.value:.3f} x" if figure.is_ratio else f"{formats.number(figure.value)} {figure.unit}"
    text = f"{value}  ({formats.reach(figure)}){'' if figure.ok else '  missed'}"
    weight = "normal" if figure.ok else "bold"
    axes.text(1.01, line, text, transform=axes.get_yaxis_transform(), va="center", fontsize=7, fontweight=weight)


def _frame(axes: Axes, figures: list[Figure]) -> None:
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(range(len(figures)), [figure.name for figure in figures], fontsize=7)
    for label, figure in zip(axes.get_yticklabels(), figures, strict=True):
        label.set_fontweight("normal" if figure.ok else "bold")
    axes.set_ylim(len(figures) - 0.3, -0.7)
    axes.grid(axis="x", linewidth=0.4, alpha=0.6)
    missed = sum(not figure.ok for figure in figures)
    axes.set_title(f"{len(figures) - missed} of {len(figures)} reached (● reached, × missed)", fontsize=9)
    axes.set_xlabel("value relative to its reach; reach over value where more is better. Left of 1 is reached.")
