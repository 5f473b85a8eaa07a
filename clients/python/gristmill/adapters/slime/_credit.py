"""A custom advantage function for slime, which returns the service's advantages per token."""

from __future__ import annotations

from typing import Any

from gristmill.adapters.slime._rank_data import ADVANTAGES, RETURNS
from gristmill.errors import FailedPreconditionError


def advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    """Set `advantages` and `returns` of a rank's train data: for each row a float32 tensor, (response,), or this rank's
    part of it under context parallelism. Use it with

        --custom-advantage-function-path gristmill.adapters.slime.advantages

    if the estimator's advantages differ within a row. Otherwise, slime's grpo reads them from `rewards`.
    """
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp

    per_token = rollout_data.pop(ADVANTAGES, None)
    if per_token is None:
        raise FailedPreconditionError(
            "the train data are not from gristmill; start slime by python -m gristmill.adapters.slime, or omit "
            "--custom-advantage-function-path"
        )
    returns = rollout_data.pop(RETURNS, per_token)
    device = rollout_data["kl"][0].device
    lengths = list(zip(rollout_data["total_lengths"], rollout_data["response_lengths"], strict=True))
    for name, rows in (("advantages", per_token), ("returns", returns)):
        rollout_data[name] = [
            slice_log_prob_with_cp(row, total, response).to(device)
            for row, (total, response) in zip(rows, lengths, strict=True)
        ]
