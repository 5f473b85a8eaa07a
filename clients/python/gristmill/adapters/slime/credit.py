"""slime's custom advantage function: credit that gristmill computed, for each token."""

from __future__ import annotations

from typing import Any

from gristmill.adapters.slime.rank_data import ADVANTAGES, RETURNS
from gristmill.errors import FailedPreconditionError


def advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    """Sets `advantages` and `returns` of a rank's train data: a float32 tensor a row, (response,), or what of it this
    rank has under context parallelism. For

        --custom-advantage-function-path gristmill.adapters.slime.advantages

    where advantages are of tokens; those of trajectories, slime's grpo takes from `rewards`.
    """
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp

    given = rollout_data.pop(ADVANTAGES, None)
    if given is None:
        raise FailedPreconditionError(
            "the train data are not gristmill's: start slime by python -m gristmill.adapters.slime, or leave out "
            "--custom-advantage-function-path"
        )
    returns = rollout_data.pop(RETURNS, given)
    device = rollout_data["kl"][0].device
    lengths = list(zip(rollout_data["total_lengths"], rollout_data["response_lengths"], strict=True))
    for name, rows in (("advantages", given), ("returns", returns)):
        rollout_data[name] = [
            slice_log_prob_with_cp(row, total, response).to(device)
            for row, (total, response) in zip(rows, lengths, strict=True)
        ]
