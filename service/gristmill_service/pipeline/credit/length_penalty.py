"""`length_penalty`: scores that are lower the longer a trajectory is compared with its group, as in prime-rl."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from gristmill._wire.columns import Int64s
from gristmill_service.config import LengthPenalty, RunConfig
from gristmill_service.estimators import Float64s
from gristmill_service.pipeline.rows.joins import find_joins
from gristmill_service.pipeline.rows.validate import Received


def penalized(received: Received, scores: Float64s, inputs: Int64s | None, config: RunConfig) -> Float64s:
    """Returns the scores less m · (a·o/max o + b·i/max i + c·t/max t), where m is the mean score of the trajectory's
    comparison group, and each maximum is that of the group; a maximum of 0 counts as 1.

    a, o: `output_tokens` and the trajectory's response tokens, over its steps. b, i: `input_tokens` and its other
    tokens, each counted once where steps share it (`input_tokens`). c, t: `turns` and its steps.
    """
    penalty, compared = config.length_penalty, received.compared
    if penalty is None or not len(scores):
        return scores
    shares = np.zeros(len(scores))
    for coefficient, lengths in _lengths(received, penalty, inputs):
        longest = np.maximum(1, compared.ranges(lengths)[1])
        shares += coefficient * lengths / longest[compared.numbers]
    # Scores of a group are added in their order, whatever else is in the batch.
    means = np.array([part.mean() for part in np.split(scores[compared.order], compared.bounds[1:-1])])
    result: Float64s = scores - means[compared.numbers] * shares
    return result


def input_tokens(received: Received, config: RunConfig) -> Int64s | None:
    """Returns how many tokens of each trajectory are not sampled, each counted once where steps share it; int64
    (trajectories,); None if no penalty counts them."""
    if config.length_penalty is None or not config.length_penalty.input_tokens:
        return None
    # As the tree of exactly equal tokens has them, whatever the run merges and however rows are partitioned.
    as_tree = config.model_copy(update={"merge": "tree", "retokenized_tail": 0, "columns": ()})
    whole = replace(received, steps=replace(received.steps, partitions=None))
    own = received.steps.prompt_lengths - find_joins(whole, as_tree).commons
    return np.add.reduceat(own, received.trajectory_bounds[:-1]) if len(own) else own


def _lengths(received: Received, penalty: LengthPenalty, inputs: Int64s | None) -> Iterator[tuple[float, Int64s]]:
    """Yields each coefficient that is not 0, with the lengths of all trajectories."""
    if penalty.output_tokens:
        outputs = np.add.reduceat(received.steps.response_lengths, received.trajectory_bounds[:-1])
        yield penalty.output_tokens, outputs
    if inputs is not None:
        yield penalty.input_tokens, inputs
    if penalty.turns:
        yield penalty.turns, np.diff(received.trajectory_bounds)
