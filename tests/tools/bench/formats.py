"""A figure in words, the same in the terminal, in the plot and in the documentation."""

from __future__ import annotations

from tests.tools.bench.figures import Figure


def number(value: float) -> str:
    """Three significant digits or more, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"


def ours(figure: Figure) -> str:
    value, unit = figure.ours
    return f"{value:.3f} {unit}" if unit.startswith("x") else f"{number(value)} {unit}"


def bound(figure: Figure) -> str:
    return "" if figure.bound is None else f"{number(figure.bound)} {figure.bound_unit}"


def ratio(figure: Figure) -> str:
    """Three decimals near 1, where 1.005 is not 1.01; else three significant digits."""
    value = figure.ratio
    return "" if value is None else f"{value:.3f}" if 0.1 <= value < 100 else number(value)


def reach(figure: Figure) -> str:
    if figure.reach is None:
        return ""
    return f"{'≤' if figure.at_most else '≥'} {figure.reach:,g} {'x' if figure.is_ratio else figure.unit}"


def verdict(figure: Figure) -> str:
    return "" if figure.reach is None else "reached" if figure.ok else "missed"
