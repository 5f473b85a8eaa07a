"""Converts samples of TRL's asynchronous rollout workers to rows (`RolloutSample` of trl/experimental/async_grpo)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from gristmill._converters.keys import Choice, Keys, Row
from gristmill._converters.refusals import refusing
from gristmill._converters.rows import response_start, samples_as_they_come, tagged
from gristmill._converters.values import array_of, attribute, attributes, uid_of, version_of
from gristmill.errors import InvalidArgumentError

_WHAT = "TRL samples"
_KEYS = Keys(
    _WHAT,
    frozenset(
        {
            *("input_ids", "completion_mask", "old_log_probs", "advantage", "model_version", "group_id"),
            *("metrics",),
        }
    ),
    ignored={
        "prompt": "messages; the sample has their tokens",
        "completion": "messages; the sample has their tokens",
        "enqueued_at": "a metric",
    },
    needed={},
)


@refusing(_WHAT)
def from_trl_async(
    samples: Iterable[Any],
    *,
    num_generations: int,
    advantages: bool = False,
    tags: Sequence[str | None] | None = None,
    round: int = 0,
    attempt: int = 0,
    policy_version: int | None = None,
    columns: Iterable[str] = (),
    ignore: Iterable[str] = (),
) -> list[Row]:
    """Convert whole groups of `RolloutSample`s, which the rollout worker of an `AsyncGRPOTrainer` puts into its queue.

    The response starts at the first token that `completion_mask` trains. `old_log_probs` are the logprobs,
    `metrics["reward"]` is the reward, and `model_version` is by default the policy version. A group must have
    `num_generations` samples. A conversation that TRL has split is refused, because a sample does not name it.

    tags: one per sample.
    advantages: whether to use TRL's advantages, for a run with `advantage_estimator: none`.
    """
    choice = Choice.of(columns, ignore)
    samples = list(samples)
    _KEYS.check({name for sample in samples for name in attributes(sample)}, choice)
    uids = [uid_of(attribute(sample, "group_id"), f"{_WHAT}: sample {row}") for row, sample in enumerate(samples)]
    _check_groups(uids, num_generations)
    rows, tag_fields = [], tagged(tags, len(samples), _WHAT)
    for sample, uid, number, tag in zip(samples, uids, samples_as_they_come(uids), tag_fields, strict=True):
        where = f"{_WHAT}: uid {uid!r} sample {number}"
        version = attribute(sample, "model_version")
        fields: Row = {
            "uid": uid,
            "round": round,
            "sample": number,
            "step": 0,
            "attempt": attempt,
            "is_last_step": True,
            "policy_version": version_of(version) if policy_version is None else policy_version,
            **_tokens(sample, where),
            "reward": _reward(sample, where),
            **tag,
        }
        if advantages:
            fields["advantage"] = float(attribute(sample, "advantage"))
        for name in choice.columns:
            fields[name] = array_of(attribute(sample, name), name, where)
        rows.append(fields)
    return rows


def _check_groups(uids: list[str], num_generations: int) -> None:
    for uid, count in Counter(uids).items():
        if count != num_generations:
            raise InvalidArgumentError(
                f"{_WHAT}: group {uid} has {count} samples for {num_generations} generations; pass whole groups, and "
                "raise fork_threshold_tokens if TRL splits conversations"
            )


def _tokens(sample: Any, where: str) -> Row:
    tokens = array_of(attribute(sample, "input_ids"), "input_ids", where)
    mask = array_of(attribute(sample, "completion_mask"), "completion_mask", where)
    logprobs = array_of(attribute(sample, "old_log_probs"), "old_log_probs", where)
    for name, values in (("completion_mask", mask), ("old_log_probs", logprobs)):
        if values.shape != tokens.shape:
            raise InvalidArgumentError(
                f"{where}: {name} has {values.size} values for {tokens.size} tokens; pass one per token"
            )
    start = response_start(mask, where)
    return {
        "prompt_token_ids": tokens[:start],
        "response_ids": tokens[start:],
        "loss_mask": mask[start:],
        "rollout_logprobs": logprobs[start:],
    }


def _reward(sample: Any, where: str) -> float:
    reward = (attribute(sample, "metrics") or {}).get("reward")
    if reward is None or math.isnan(reward):
        raise InvalidArgumentError(
            f"{where}: the reward in metrics is {reward}, because no function scored the sample; omit its group"
        )
    return float(reward)
