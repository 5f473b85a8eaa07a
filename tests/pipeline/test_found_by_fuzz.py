"""Cases in which random batches and an independent reference disagreed, each in its smallest form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gristmill._wire.rows import from_rows
from gristmill_service.cli.offline.rollout_files import read_batches
from gristmill_service.config import RunConfig, parse_config
from gristmill_service.pipeline import BuiltBatch, build_batch
from tests import naive

Row = dict[str, Any]
ONE = {"train_batch_size": 1, "n_samples_per_prompt": 1, "policy_mini_batch_size": 1, "micro_batch": {"size": 8}}


def config(**more: Any) -> RunConfig:
    return parse_config(ONE | {"step_wise": True} | more)


def step(
    prompt: list[int], response: list[int], reward: Any = 0.0, *, sample: int = 0, number: int = 0, **more: Any
) -> Row:
    return {
        "uid": "a",
        "sample": sample,
        "step": number,
        "is_last_step": False,
        "prompt_token_ids": prompt,
        "response_ids": response,
        "loss_mask": [1] * len(response),
        "reward": reward,
    } | more


def built(rows: list[Row], settings: RunConfig) -> BuiltBatch:
    last = {(row["uid"], row["sample"]): row for row in rows}
    for row in last.values():
        row["is_last_step"] = True
    return build_batch(from_rows(rows, columns=settings.columns), settings, run="r", batch=0)


def tensor(batch: BuiltBatch, name: str) -> list[list[float]]:
    """A column of the real rows, in their order."""
    rows = [row for shard in batch.shards for row in naive.shard_rows(shard) if row["row"] >= 0]
    return [row[name].tolist() for row in sorted(rows, key=lambda row: int(row["row"]))]


def test_equal_rewards_are_equal_scores_however_steps_divide_them() -> None:
    """0.7 five times, in one step and in two, was 3.5 and 3.4999999999999996."""
    rows = [
        step([1], [2] * 5, [0.7] * 5),
        step([1], [2] * 2, [0.7] * 2, sample=1),
        step([1], [2] * 3, [0.7] * 3, sample=1, number=1),
    ]
    settings = config(n_samples_per_prompt=2, trajectory_score="sum", zero_variance_filter="mask")
    batch = built(rows, settings)
    assert batch.plan.counts["zero_variance_groups"] == 1
    assert not np.concatenate([np.ravel(row) for row in tensor(batch, "advantages")]).any()


def test_opposite_rewards_of_any_size_cancel_over_steps() -> None:
    rows = [
        step([1], [2, 2], [1e30, 1.0]),
        step([1], [2], [-1e30], number=1),
        step([1], [2], [1.0], sample=1),
    ]
    batch = built(rows, config(n_samples_per_prompt=2, trajectory_score="sum", zero_variance_filter="mask"))
    assert batch.plan.counts["zero_variance_groups"] == 1


def test_each_batch_of_a_file_has_its_own_current_version_and_versions_of_tokens(tmp_path: Path) -> None:
    """Another batch's version dropped groups, and its column was given to batches without one."""
    versions: list[list[int] | None] = [[5], [1], None]
    rows = [
        step([1], [2], 1.0)
        | {"uid": uid, "is_last_step": True}
        | ({} if of_row is None else {"policy_versions": of_row})
        for uid, of_row in zip("abc", versions, strict=True)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = config(max_staleness=1, stale="drop")
    batches, _ = read_batches(path, settings, lambda _: None)
    counts = [build_batch(batch, settings, run="r", batch=0).plan.counts["stale_groups"] for batch in batches]
    assert counts == [0, 0, 0]
    assert [batch.token_versions is not None for batch in batches] == [True, True, False]


SUMS = {"name": "klsum", "dtype": "float32", "scope": "row", "merge": "sum"}


@pytest.mark.parametrize("merge", ["none", "prefix", "tree"])
def test_the_kl_of_a_step_without_trained_tokens_counts_under_every_merge_mode(merge: str) -> None:
    rows = [
        step([1], [1], 1.0, klsum=2.0),
        step([1], [1], 1.0, sample=1, loss_mask=[0], klsum=2.0),
        step([1, 1], [0], 1.0, sample=1, number=1, klsum=2.0),
    ]
    settings = config(
        n_samples_per_prompt=2,
        grpo_norm_by_std=False,
        merge=merge,
        columns=[SUMS],
        kl_in_reward={"coef": 1.0, "column": "klsum"},
    )
    advantages = [set(row) for row in tensor(built(rows, settings), "advantages")]
    assert advantages == [{1.0}, *[{-1.0}] * (len(advantages) - 1)]


LOGPROBS = [{"name": name, "dtype": "float32", "scope": "response"} for name in ("old_logprobs", "ref_logprobs")]


def forked(first: Any) -> list[Row]:
    """Step 1 has another token in place of step 0's last one, which step 2's row keeps."""
    steps = [([1, 2], [3, 4, 5], first), ([1, 2, 3, 4, 9, 6], [7], 0.0), ([1, 2, 3, 4, 5, 6], [8], 0.0)]
    return [
        step(prompt, response, reward, number=number)
        | {name: [-1.0] * len(response) for name in ("old_logprobs", "ref_logprobs")}
        for number, (prompt, response, reward) in enumerate(steps)
    ]


@pytest.mark.parametrize("kl", [None, {"coef": 0.0, "estimator": "k1"}])
def test_a_reward_is_on_its_own_token_in_the_row_that_keeps_it_with_and_without_kl(kl: dict[str, Any] | None) -> None:
    settings = config(merge="tree", retokenized_tail=1, columns=LOGPROBS, kl_in_reward=kl)
    assert tensor(built(forked(0.5), settings), "rewards") == [[0, 0, 0, 0, 0], [0, 0, 0.5, 0, 0]]


@pytest.mark.parametrize("kl", [None, {"coef": 0.0, "estimator": "k1"}])
@pytest.mark.parametrize("reward", [0.75, [0.25, 0.0, 0.5]])
def test_a_reward_whose_token_no_row_keeps_moves_to_the_last_kept_one(reward: Any, kl: dict[str, Any] | None) -> None:
    rows = forked(reward)[:2]
    if isinstance(reward, list):
        rows[1]["reward"] = [0.0]
    settings = config(merge="tree", retokenized_tail=1, columns=LOGPROBS, kl_in_reward=kl)
    expected = [0.25, 0.5, 0, 0, 0] if isinstance(reward, list) else [0, 0.75, 0, 0, 0]
    assert tensor(built(rows, settings), "rewards") == [expected]


def equal(name: str) -> dict[str, Any]:
    return {"name": name, "dtype": "int32", "scope": "row", "merge": "equal"}


def test_a_mismatch_names_the_column_that_kept_a_step_from_the_sequence_that_its_tokens_extend() -> None:
    """An earlier sequence with as long a common beginning, which was no candidate, hid the column."""
    tokens = list(range(1, 17))
    rows = [
        step(tokens[:15], tokens[15:], x0=0),
        step([*tokens, 30, 31, 32], [33], number=1, x0=1),
        step(tokens, [40], number=2, x0=2),
    ]
    batch = built(rows, config(merge="tree", columns=[equal("x0")]))
    assert [(one.step, one.index, one.column) for one in batch.plan.merge_mismatches][1] == (2, 16, "x0")
    assert batch.plan.counts["column_mismatches"] == 2


def test_a_mismatch_names_no_column_where_the_first_token_differs() -> None:
    """The tail that may differ was longer than the sequence."""
    rows = [step([45], [12], x4=0), step([49, 23, 19, 25], [1], number=1, x4=1)]
    batch = built(rows, config(merge="prefix", retokenized_tail=3, columns=[equal("x4")]))
    assert [(one.index, one.column) for one in batch.plan.merge_mismatches] == [(0, "")]
    assert batch.plan.counts["column_mismatches"] == 0


def test_copies_of_tokens_that_an_earlier_row_trains_have_no_credit_of_their_own() -> None:
    """They had the advantages and returns of the trained ones, in rows that do not train them."""
    rows = [step([1], [2], 1.0), step([1, 2], [3], 1.0, number=1), step([1, 2], [4], 1.0, number=2)]
    batch = built(rows, config(merge="tree", advantage_estimator="reinforce++"))
    for name in ("advantages", "returns"):
        assert tensor(batch, name) == [[3, 2], [0, 1]]


def test_a_batch_without_tags_has_none_whatever_other_batches_of_its_file_have(tmp_path: Path) -> None:
    rows = [step([1], [2], 1.0) | {"uid": uid, "is_last_step": True} for uid in "ab"]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [rows[0] | {"tag": "math"}, rows[1]]))
    batches, _ = read_batches(path, config(), lambda _: None)
    assert [build_batch(batch, config(), run="r", batch=0).plan.tags for batch in batches] == [["math"], []]
