"""`length_penalty`: scores that are lower the longer a trajectory is compared with its group, as in prime-rl."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gristmill._wire.columns import Int64s
from gristmill_service.config import LengthPenalty, RunConfig
from gristmill_service.estimators import Float64s
from gristmill_service.pipeline.rows.joins import find_joins
from gristmill_service.pipeline.rows.validate import Received


def penalized(received: Received, scores: Float64s, config: RunConfig) -> Float64s:
    """Returns the scores less m · (a·o/max o + b·i/max i + c·t/max t), where m is the mean score of the trajectory's
    comparison group, and each maximum is that of the group; a maximum of 0 counts as 1.

    a, o: `output_tokens` and the trajectory's response tokens, over its steps. b, i: `input_tokens` and its other
    tokens, each counted once where steps share it. c, t: `turns` and its steps.
    """
    penalty, compared = config.length_penalty, received.compared
    if penalty is None or not len(scores):
        return scores
    shares = np.zeros(len(scores))
    for coefficient, lengths in _lengths(received, penalty, config):
        longest = np.maximum(1, compared.ranges(lengths)[1])
        shares += coefficient * lengths / longest[compared.numbers]
    # Scores of a group are added in their order, whatever else is in the batch.
    means = np.array([part.mean() for part in np.split(scores[compared.order], compared.bounds[1:-1])])
    result: Float64s = scores - means[compared.numbers] * shares
    return result


def _lengths(received: Received, penalty: LengthPenalty, config: RunConfig) -> list[tuple[float, Int64s]]:
    """Returns each coefficient that is not 0, with the lengths of all trajectories."""
    steps, begins = received.steps, received.trajectory_bounds[:-1]
    lengths = []
    if penalty.output_tokens:
        lengths.append((penalty.output_tokens, np.add.reduceat(steps.response_lengths, begins)))
    if penalty.input_tokens:
        # As the tree of exactly equal tokens has them, whatever the run merges and however rows are partitioned.
        as_tree = config.model_copy(update={"merge": "tree", "retokenized_tail": 0, "columns": ()})
        whole = replace(received, steps=replace(steps, partitions=None))
        own = steps.prompt_lengths - find_joins(whole, as_tree).commons
        lengths.append((penalty.input_tokens, np.add.reduceat(own, begins)))
    if penalty.turns:
        lengths.append((penalty.turns, np.diff(received.trajectory_bounds)))
    return lengths
