"""The plot that is written at the end: reward and success over the batches, and what padding cost."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiment import BEST_SUCCESS, BLIND_SUCCESS
from trainer import BatchReport


def plot(reports: list[BatchReport], path: Path) -> None:
    figure = Figure(figsize=(9, 7), layout="tight")
    learning, cost = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    _plot_learning(learning, reports)
    _plot_cost(cost, reports)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _plot_learning(axes: Axes, reports: list[BatchReport]) -> None:
    batches = [report.batch for report in reports]
    axes.plot(batches, [report.reward for report in reports], label="mean reward")
    axes.plot(batches, [report.success for report in reports], label="success rate")
    axes.axhline(BEST_SUCCESS, color="grey", linestyle="--", linewidth=1, label="success of the best player")
    axes.axhline(BLIND_SUCCESS, color="grey", linestyle=":", linewidth=1, label="most without reading the hints")
    axes.set_title("A policy learns to search by hints, its rollouts going through gristmill")
    axes.set_ylabel("per game")
    axes.legend(loc="lower right")


def _plot_cost(axes: Axes, reports: list[BatchReport]) -> None:
    batches = [report.batch for report in reports]
    axes.plot(batches, [100 * report.padding_share for report in reports], color="tab:red", label="padding share")
    merged = [100 * report.rows / report.rows_received for report in reports]
    axes.plot(batches, merged, color="tab:green", label="rows left after merging")
    axes.set_ylabel("%")
    axes.set_ylim(0, 100)
    axes.set_xlabel("batch")
    axes.legend(loc="upper right")
