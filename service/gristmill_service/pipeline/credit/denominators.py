"""The numbers by which the token losses of a mini-batch are divided, and the factors of `loss_reduction`."""

from __future__ import annotations

from typing import Any

import numpy as np

from gristmill._wire.columns import Int64s
from gristmill_service.config import RunConfig
from gristmill_service.estimators import Float64s
from gristmill_service.pipeline.scheduling.plan import MiniBatchPlan


class Denominators:
    """The numbers by which the token losses of one mini-batch are divided, over all its ranks.

    Counts are of kept, real rows, and at least 1; with `only_trained` (`loss_reduction_over: trained`) of the rows,
    prompts and trajectories that have a loss token. `row_tokens, prompt_tokens, trajectory_tokens` are int64 (kept
    rows,): the loss tokens of each row, of its prompt group and of its trajectory within the mini-batch. `loss_weight`
    is the sum of the weights of tokens; None without weights.
    """

    def __init__(
        self,
        mini_batch: MiniBatchPlan,
        loss_tokens: Int64s,
        groups: Int64s,
        trajectories: Int64s,
        loss_weight: float | None = None,
        *,
        only_trained: bool = False,
    ) -> None:
        kept = slice(mini_batch.start, mini_batch.kept_end)
        tokens = loss_tokens[kept]
        self.start, self.loss_weight = mini_batch.start, loss_weight
        self.loss_tokens = max(1, int(tokens.sum()))
        self.rows = max(1, int(np.count_nonzero(tokens)) if only_trained else len(tokens))
        self.row_tokens = np.maximum(1, tokens)
        self.prompts, self.prompt_tokens = _summed(tokens, groups[kept], only_trained)
        self.trajectories, self.trajectory_tokens = _summed(tokens, trajectories[kept], only_trained)

    @property
    def totals(self) -> dict[str, Any]:
        """The denominators of the whole mini-batch."""
        return {
            "loss_tokens": self.loss_tokens,
            "rows": self.rows,
            "prompts": self.prompts,
            "trajectories": self.trajectories,
            **({} if self.loss_weight is None else {"loss_weight": self.loss_weight}),
        }

    def scale(self, config: RunConfig) -> Float64s:
        """Returns the factor by which `loss_reduction` scales each kept row's advantage; float64 (kept rows,).

        Summing the token losses of all ranks then gives the reduction.
        """
        match config.loss_reduction:
            case "none":
                divisor: Int64s | float = 1
            case "token_mean":
                divisor = self.loss_tokens
            case "sequence_mean":
                divisor = self.rows * self.row_tokens
            case "seq_mean_token_sum_norm":
                divisor = float(self.rows * (config.max_seq_len or 1))  # may be beyond int64
            case "prompt_mean":
                divisor = self.prompts * self.prompt_tokens
            case "trajectory_mean":
                divisor = self.trajectories * self.trajectory_tokens
        scale: Float64s = np.ones(len(self.row_tokens)) / divisor
        return scale


def _summed(tokens: Int64s, owners: Int64s, only_trained: bool) -> tuple[int, Int64s]:
    """Returns the number of owners, or with `only_trained` of those with tokens, and the tokens of each row's owner;
    all at least 1. Rows of an owner are adjacent."""
    if not len(tokens):
        return 1, tokens
    first = np.flatnonzero(np.append(True, owners[1:] != owners[:-1]))
    sums = np.add.reduceat(tokens, first)
    count = max(1, int(np.count_nonzero(sums)) if only_trained else len(first))
    return count, np.repeat(np.maximum(1, sums), np.diff(first, append=len(tokens)))
