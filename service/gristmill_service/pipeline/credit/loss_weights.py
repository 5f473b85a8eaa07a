"""Computes the column `loss_weight`: the weight of each token in the loss, which `loss_mask` does not affect."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.column_spec import LOSS_WEIGHT, by_name
from gristmill._wire.columns import Ragged
from gristmill_service.config import RunConfig
from gristmill_service.pipeline.rows.merge import Rows
from gristmill_service.pipeline.rows.row_values import extra_of
from gristmill_service.pipeline.rows.validate import Received


def loss_weights(received: Received, rows: Rows, trained: NDArray[np.bool_], config: RunConfig) -> Ragged | None:
    """Returns the weights of each visit: those of the observation before it, followed by those of its kept tokens.

    float32 (visits,), without gaps; None if the run has no weights. A token has its weight in the first row that
    contains it, and weight 0 in later rows, so that it counts once. Observations have `observation_weight`, other
    tokens the weight that was sent, or, if rows contain no weights, their `loss_mask` after filters.
    trained: bool (steps,), False where a filter masks.
    """
    declared = by_name(config.columns).get(LOSS_WEIGHT)
    if declared is None and not config.observation_weight:
        return None
    steps = received.steps
    counts = np.stack([rows.observed, rows.shared, rows.kept - rows.shared], axis=1)
    if declared is not None:
        own = rows.trained(extra_of(declared, steps).values).compact().values
    else:
        own = rows.trained(steps.loss_mask).compact().values * np.repeat(trained[rows.steps], counts[:, 2])
    levels = np.zeros(counts.shape, np.float32)
    levels[:, 0] = np.where(rows.is_first, config.observation_weight, 0)
    weights = np.repeat(levels.ravel(), counts.ravel())
    weights[np.repeat(np.arange(counts.size) % 3 == 2, counts.ravel())] = own
    return Ragged.from_lengths(weights, counts.sum(axis=1))
