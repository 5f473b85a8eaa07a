"""Converts rows of a shard to samples for the queue of `AsyncGRPOTrainer`."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from gristmill.errors import InvalidArgumentError
from gristmill.torch import Shard


def samples_of(shard: Shard, first_group: int) -> list[RolloutSample]:
    """Return a sample for every row with trained tokens. The messages of its prompt and completion, which TRL shows in
    traces, are empty, because a row has only tokens.

    first_group: the number of the shard's first prompt group. Other groups are numbered from there.
    Raises InvalidArgumentError for rows without log-probabilities of the sampler, or with several advantages.
    """
    if not any(name.endswith("rollout_logprobs") for name in shard.tensors):
        raise InvalidArgumentError(
            f"{shard.position}: rows have no rollout_logprobs, which the loss needs; let workers send them with every "
            "step"
        )
    tokens, edges = _numpy(shard, "sequences", "row")
    (trained, ends), (logprobs, _), (advantages, _), (rewards, _) = (
        _numpy(shard, name, "response") for name in ("loss_mask", "rollout_logprobs", "advantages", "rewards")
    )
    uids, rounds = shard.metadata["uids"], shard.metadata["rounds"]
    groups = {group: first_group + place for place, group in enumerate(dict.fromkeys(zip(uids, rounds, strict=True)))}
    samples = []
    for row, ((begin, end), (start, stop)) in enumerate(zip(pairwise(edges), pairwise(ends), strict=True)):
        mask, length = trained[start:stop] != 0, end - begin
        if not mask.any():
            continue
        samples.append(
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
    return samples


def _numpy(shard: Shard, name: str, part: Literal["row", "response"]) -> tuple[NDArray[Any], list[int]]:
    rows = shard.jagged(name, part)
    return rows.values.numpy(), rows.offsets.tolist()


def _after_prompt(values: NDArray[Any], length: int) -> NDArray[Any]:
    """Return zeros for the prompt of the row, followed by the values of the response."""
    return np.concatenate([np.zeros(length - len(values), values.dtype), values])


def _single(advantages: NDArray[Any], shard: Shard, uid: str) -> float:
    if (advantages != advantages[0]).any():
        raise InvalidArgumentError(
            f"{shard.position}: a row of {uid!r} has several advantages, but AsyncGRPOTrainer supports one per row; "
            "use advantage_estimator: grpo, rloo or maxrl"
        )
    return float(advantages[0])
