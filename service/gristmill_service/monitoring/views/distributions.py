"""How a batch's trajectories are spread: scores, lengths, turns, and why they stopped."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from gristmill_service.monitoring.health.health_models import Document
from gristmill_service.monitoring.views.batch_summary import BatchSummary

_BARS = 24
_REASONS = 20


class Histogram(Document):
    """A bar counts the trajectories from its low to its high, which are one where there are few different values."""

    name: Literal["score", "response tokens", "turns"]
    lows: list[float]
    highs: list[float]
    counts: list[int]


class BatchDistributions(Document):
    run: str
    batch: int
    trajectories: int
    histograms: list[Histogram]
    stop_reasons: dict[str, int] = Field(description="Of last steps, the 20 most frequent.")


def distributions(run: str, batch: int, rows: BatchSummary) -> BatchDistributions:
    received = rows.received
    lasts = (received.trajectory_bounds[1:] - 1).tolist()
    reasons = Counter(received.steps.stop_reasons[last] or "not told" for last in lasts)
    return BatchDistributions(
        run=run,
        batch=batch,
        trajectories=len(lasts),
        histograms=[
            _histogram("score", rows.scores),
            _histogram("response tokens", rows.responses),
            _histogram("turns", np.diff(received.trajectory_bounds)),
        ],
        stop_reasons=dict(reasons.most_common(_REASONS)),
    )


def _histogram(
    name: Literal["score", "response tokens", "turns"], values: NDArray[np.float64] | NDArray[np.int64]
) -> Histogram:
    different, counts = np.unique(values, return_counts=True)
    if len(different) <= _BARS:
        edges = different.tolist()
        return Histogram(name=name, lows=edges, highs=edges, counts=counts.tolist())
    counts, edges = np.histogram(values, _BARS)
    return Histogram(name=name, lows=edges[:-1].tolist(), highs=edges[1:].tolist(), counts=counts.tolist())
