"""Rows of a shard as the samples that `AsyncGRPOTrainer` takes from its queue."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from gristmill._wire.columns import Array
from gristmill.errors import InvalidArgumentError
from gristmill.torch import Shard


def samples_of(shard: Shard, first_group: int) -> list[RolloutSample]:
    """One for every row that has trained tokens. Their prompt and completion as messages are left empty: TRL shows them
    in traces, and a row has tokens.

    first_group: the number of the shard's first prompt group; the others' follow as they come.
    Raises InvalidArgumentError for rows without log-probabilities of the sampler, or with several advantages.
    """
    if not any(name.endswith("rollout_logprobs") for name in shard.tensors):
        raise InvalidArgumentError(
            f"{shard.position}: rows have no rollout_logprobs, and the loss is a ratio to them; have workers send them "
            "with every step"
        )
    tokens, edges = _numpy(shard, "sequences", "row")
    (trained, ends), (logprobs, _), (advantages, _), (rewards, _) = (
        _numpy(shard, name, "response") for name in ("loss_mask", "rollout_logprobs", "advantages", "rewards")
    )
    uids, rounds = shard.metadata["uids"], shard.metadata["rounds"]
    groups = {group: first_group + place for place, group in enumerate(dict.fromkeys(zip(uids, rounds, strict=True)))}
    found = []
    for row, ((begin, end), (start, stop)) in enumerate(zip(pairwise(edges), pairwise(ends), strict=True)):
        mask, length = trained[start:stop] != 0, end - begin
        if not mask.any():
            continue
        found.append(
            RolloutSample(
                prompt=[],
                completion=[],
                input_ids=tokens[begin:end].astype(np.int64),
                completion_mask=_after_prompt(mask.astype(np.int64), length),
                old_log_probs=_after_prompt(np.where(mask, logprobs[start:stop], 0).astype(np.float32), length),
                advantage=_single(advantages[start:stop][mask], shard, uids[row]),
                model_version=int(shard["policy_version"][row]),
                group_id=groups[uids[row], rounds[row]],
                metrics={"reward": float(rewards[start:stop].sum())},
            )
        )
    return found


def _numpy(shard: Shard, name: str, part: str) -> tuple[Array, list[int]]:
    found = shard.jagged(name, part)  # type: ignore[arg-type]
    return found.values.numpy(), found.offsets.tolist()


def _after_prompt(values: Array, length: int) -> Array:
    """A response's values, behind zeros for the row's other tokens."""
    return np.concatenate([np.zeros(length - len(values), values.dtype), values])


def _single(advantages: Array, shard: Shard, uid: str) -> float:
    if (advantages != advantages[0]).any():
        raise InvalidArgumentError(
            f"{shard.position}: a row of {uid!r} has an advantage for each token, and AsyncGRPOTrainer takes one a "
            "row; use advantage_estimator: grpo, rloo or maxrl"
        )
    return float(advantages[0])
