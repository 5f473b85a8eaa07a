"""The rules of columns that credit is computed of: a row that would fail its whole batch is refused when it comes."""

from __future__ import annotations

import numpy as np

from gristmill._wire.steps import Steps
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import RunConfig
from gristmill_service.pipeline.credit.kl import kl

MOST = 1e30
"""The largest number that credit is computed of: float32 holds a hundred million times that, so that no sum over a
trajectory fails the batch that it is in."""


def reward_columns(config: RunConfig) -> frozenset[str]:
    """The columns that the `rewards` of shards are computed of."""
    reference = config.kl_in_reward
    has_kl = reference is not None and reference.estimator is not None
    return frozenset([config.kl_from, "ref_logprobs"] if has_kl else ())


def credit_columns(config: RunConfig) -> frozenset[str]:
    """The columns that advantages are computed of."""
    reference = config.kl_in_reward
    of_rows = () if reference is None or reference.column is None else (reference.column,)
    return reward_columns(config).union(config.estimator.columns, of_rows)


def check_credit_columns(steps: Steps, config: RunConfig) -> None:
    """Raises InvalidArgumentError naming the row, the column, the value and the remedy."""
    for name in sorted(credit_columns(config)):
        extra = steps.extras.get(name)
        if extra is not None:
            _check_fits(steps, name)
    reference = config.kl_in_reward
    if reference is not None and reference.estimator is not None and "ref_logprobs" in steps.extras:
        _check_kl(steps, config)


def _check_fits(steps: Steps, name: str) -> None:
    column = steps.extras[name].values
    if not column.values.size or max(abs(float(column.values.min())), abs(float(column.values.max()))) <= MOST:
        return
    for row, values in enumerate(column.arrays()):
        outside = np.flatnonzero(~(np.abs(values) <= MOST))
        if outside.size:
            at = int(outside[0])
            raise InvalidArgumentError(
                f"{steps.name(row)}: {name}[{at}] is {values[at]}, which is too large to be added up in float32; scale "
                f"it down to at most {MOST:g}"
            )


def _check_kl(steps: Steps, config: RunConfig) -> None:
    reference = config.kl_in_reward
    assert reference is not None, "checked by who calls"
    assert reference.estimator is not None, "checked by who calls"
    sampled = steps.logprobs if config.kl_from == "rollout_logprobs" else None
    if sampled is None and "old_logprobs" in steps.extras:
        sampled = steps.extras["old_logprobs"].values
    if sampled is None:
        return
    for row, (ours, theirs) in enumerate(
        zip(sampled.arrays(), steps.extras["ref_logprobs"].values.arrays(), strict=True)
    ):
        if len(ours) != len(theirs):
            continue
        estimates = reference.coef * kl(ours.astype(np.float64), theirs.astype(np.float64), reference.estimator)
        outside = np.flatnonzero(~(np.abs(estimates) <= MOST) & (steps.loss_mask[row] == 1))
        if outside.size:
            at = int(outside[0])
            raise InvalidArgumentError(
                f"{steps.name(row)}: the KL of response token {at} is {estimates[at]}, computed from the "
                f"log-probabilities {ours[at]} and {theirs[at]} (ref_logprobs); check that both are of the same "
                "tokens, or use the estimator k1 or k2"
            )
