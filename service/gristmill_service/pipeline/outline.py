"""The outline of a batch: what estimators of scores, filters and scheduling read of its rows, without their tokens.

A run's log keeps the outlines of its newest batches also when their rows are freed.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from gristmill._wire.columns import Int64s, Ragged
from gristmill._wire.row_fields import UNKNOWN
from gristmill._wire.steps import Steps
from gristmill_service.config import RunConfig, parse_config
from gristmill_service.estimators import ESTIMATORS, GroupEstimator
from gristmill_service.pipeline.rows.filters import trained_steps
from gristmill_service.pipeline.rows.merge import ones, row_loss_tokens
from gristmill_service.pipeline.scored_batch import ScoredBatch

MOST_ROWS = 1 << 16

# The values with which an outline's rows, which are merged and filtered, become themselves.
_LOST = {"step_wise": True, "merge": "none", "retokenized_tail": 0, "trajectory_score": "last_step", "columns": []}
_LOST |= {"overlong_filter": [], "kl_in_reward": None, "length_penalty": None, "step_groups": None}

# For each group, its trajectories; for each trajectory, the policy versions that it is behind (-1: unknown) and its
# rows; for each row, prompt tokens, response tokens, and loss tokens without `zero_variance_filter`; scores.
_decoder = msgspec.msgpack.Decoder(tuple[list[list[int]], list[float]])


def outline_of(scored: ScoredBatch, config: RunConfig) -> bytes:
    """Returns a batch's outline; empty for a batch with more than `MOST_ROWS`, with other properties of rows by which
    they are scheduled or compared, or with trained tokens that no row keeps (`retokenized_tail`): `opo` counts them."""
    received, rows = scored.received, scored.rows
    if not 0 < len(rows) <= MOST_ROWS or scored.costs is not None or scored.partitions is not None or received.agents:
        return b""
    trained, _ = trained_steps(received, scored.scores, config.model_copy(update={"zero_variance_filter": None}))
    loss_tokens = row_loss_tokens(rows, received.steps.loss_mask, trained)
    if loss_tokens.sum() != ones(received.steps.loss_mask)[trained].sum():
        return b""
    columns = (
        *(np.diff(received.group_bounds), scored.behind, np.bincount(rows.trajectories, minlength=len(scored.scores))),
        *(rows.prompt_lengths, rows.response_lengths, loss_tokens),
    )
    lists = [column.tolist() for column in columns], scored.scores.tolist()
    return zlib.compress(msgspec.msgpack.encode(lists), 1)


def needs_rows(changes: Mapping[str, Any], config: RunConfig) -> bool:
    """Returns whether the run's settings or changes of them need more of a batch than its outline. What `stale` dropped
    or masked is lost."""
    estimator = ESTIMATORS.get(changes.get("advantage_estimator", "grpo"))
    reads_scores = isinstance(estimator, GroupEstimator) and not (
        estimator.reads_components or estimator.compares_steps
    )
    lost = _LOST.keys() | (set() if config.stale == "count" else {"max_staleness", "stale"})
    is_lost = not lost.isdisjoint(changes) or changes.get("stale") == "mask"
    return is_lost or not reads_scores or "prefix_tree" in (config.layout, changes.get("layout"))


def outlined(config: RunConfig) -> tuple[RunConfig, bool]:
    """Returns the settings with which an outline's rows are planned, and whether their advantages are those of the
    run: not if more than scores is in them."""
    settings = json.loads(config.model_dump_json(exclude_defaults=True))
    is_complete = not needs_rows({"advantage_estimator": config.advantage_estimator}, config)
    is_complete = is_complete and config.kl_in_reward is None and config.length_penalty is None
    settings |= _LOST | ({} if is_complete else {"advantage_estimator": "grpo"})
    return parse_config(settings | ({"stale": "count"} if config.stale == "mask" else {})), is_complete


def restored(outline: bytes) -> tuple[Steps, int]:
    """Returns rows of zeros with an outline's lengths and scores, as steps that are not merged, and the current policy
    version. Their tokens are all the same memory."""
    columns, scores = _decoder.decode(zlib.decompress(outline))
    samples, behind, counts, prompts, responses, trained = (np.array(column, np.int64) for column in columns)
    zeros, current, longest = np.zeros(len(prompts), np.int64), int(behind.max()), int((prompts + responses).max())
    numbers = _numbers(counts)
    is_last = np.append(numbers[1:] == 0, True)
    rewards = np.zeros(len(prompts))
    rewards[is_last] = scores
    steps = Steps(
        uids=[str(group) for group in np.repeat(np.repeat(np.arange(len(samples)), samples), counts).tolist()],
        rounds=zeros.astype(np.int32),
        samples=np.repeat(_numbers(samples), counts).astype(np.int32),
        steps=numbers.astype(np.int32),
        attempts=zeros.astype(np.int32),
        is_last_steps=is_last,
        stop_reasons=[""] * len(prompts),
        policy_versions=np.repeat(np.where(behind == UNKNOWN, UNKNOWN, current - behind), counts).astype(np.int32),
        tokens=Ragged(np.zeros(longest, np.int32), zeros, prompts + responses),
        prompt_lengths=prompts,
        # Each mask has as many ones as tokens are trained, and then zeros.
        loss_mask=Ragged(np.repeat(np.array([1, 0], np.uint8), longest), longest - trained, responses),
        logprobs=None,
        rewards=rewards,
        token_rewards=None,
        rewards_pending=np.zeros(len(prompts), np.bool_),
    )
    return steps, current


def _numbers(counts: Int64s) -> Int64s:
    """Returns 0, 1, ... for each of the counts."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
