"""The laws of the specification, over drawn batches and settings, against the rules written down a second time."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from gristmill._wire.rows import from_rows
from gristmill_service.config import parse_config
from gristmill_service.pipeline import BuiltBatch, build_batch
from tests import naive
from tests.strategies import LAW, Row, batches_and_settings, rollouts


def built(rows: list[Row], config: dict[str, Any]) -> BuiltBatch:
    return build_batch(from_rows(rows), parse_config(config), run="r", batch=0)


def merged(rows: list[Row], config: dict[str, Any]) -> list[naive.Merged]:
    return naive.merged(rows, config["merge"], config.get("retokenized_tail", 0))


@LAW
@given(batches_and_settings())
def test_every_row_carries_its_own_tokens_masks_rewards_and_advantage(drawn: tuple[list[Row], dict[str, Any]]) -> None:
    rows, config = drawn
    groups = merged(rows, config)
    given_advantages = naive.advantages(rows, config)
    batch = built(rows, config)
    seen = set()
    for shard in batch.shards:
        for row in naive.shard_rows(shard):
            index = int(row["row"])
            if index < 0:
                assert row["is_padding"]
                continue
            group, steps = groups[index], groups[index].steps
            seen.add((shard.address.model, index))
            last = steps[-1]
            assert row["sequences"].tolist() == last["prompt_token_ids"] + last["response_ids"]
            expected = group.standing(lambda step: step["loss_mask"], only_trained=True)
            np.testing.assert_array_equal(row["loss_mask"], expected)
            np.testing.assert_allclose(row["rewards"], group.rewards(), rtol=1e-6)
            if "rollout_logprobs" in last:
                expected = group.standing(lambda step: step["rollout_logprobs"])
                np.testing.assert_array_equal(row["rollout_logprobs"], expected)
            values = set(row["advantages"].tolist())
            assert len(values) == 1
            if shard.address.model == "critic" or config["loss_reduction"] == "none":
                want = given_advantages[last["uid"], last["sample"]]
                np.testing.assert_allclose(values.pop(), want, rtol=1e-5, atol=1e-9)
            known = [s["policy_version"] for s in steps if s["policy_version"] >= 0]
            assert row["policy_version"] == (min(known) if known else -1)
            assert (row["step_first"], row["step_last"]) == (steps[0]["step"], last["step"])
            assert bool(row["is_last_step"]) == last["is_last_step"]
    assert seen >= {("policy", index) for index in range(len(groups))}


@LAW
@given(batches_and_settings())
def test_summing_over_all_ranks_gives_the_loss_reduction(drawn: tuple[list[Row], dict[str, Any]]) -> None:
    """With a loss of 1 a token and advantages of 1, the reduction of each mini-batch is what its definition says."""
    rows, config = drawn
    for row in rows:
        row["advantage"] = 1.0
    config["advantage_estimator"] = "none"
    batch = built(rows, config)
    groups = merged(rows, config)
    for part in batch.plan.mini_batches:
        if part.model != "policy":
            continue
        total = sum(
            float(row["advantages"][row["loss_mask"] == 1].sum(dtype=np.float64))
            for shard in batch.shards
            if (shard.address.model, shard.address.mini_batch) == ("policy", part.index)
            for row in naive.shard_rows(shard)
        )
        covered = groups[part.start : part.end]
        np.testing.assert_allclose(total, _reduction(covered, config), rtol=1e-5)


def _reduction(covered: list[naive.Merged], config: dict[str, Any]) -> float:
    tokens: list[int] = [sum(row.standing(lambda step: step["loss_mask"], only_trained=True)) for row in covered]
    uids = [row.steps[0]["uid"] for row in covered]
    keys = [(row.steps[0]["uid"], row.steps[0]["sample"]) for row in covered]

    def mean_over(owners: Sequence[object]) -> float:
        sums = {owner: sum(t for t, o in zip(tokens, owners, strict=True) if o == owner) for owner in owners}
        return float(np.mean([1.0 if total else 0.0 for total in sums.values()]))

    match config["loss_reduction"]:
        case "none":
            return sum(tokens)
        case "token_mean":
            return 1.0 if sum(tokens) else 0.0
        case "sequence_mean":
            return float(np.mean([1.0 if count else 0.0 for count in tokens]))
        case "seq_mean_token_sum_norm":
            return float(np.mean([count / config["max_seq_len"] for count in tokens]))
        case "prompt_mean":
            return mean_over(uids)
        case "trajectory_mean":
            return mean_over(keys)
        case unknown:
            raise ValueError(unknown)


@LAW
@given(batches_and_settings(merge="none"))
def test_merging_never_changes_scores_advantages_or_trained_tokens(drawn: tuple[list[Row], dict[str, Any]]) -> None:
    rows, config = drawn
    config["loss_reduction"] = "none"

    def trained(merge: str) -> tuple[list[Any], float]:
        tokens = []
        batch = built(rows, {**config, "merge": merge})
        for shard in batch.shards:
            if shard.address.model == "policy":
                _, metadata = naive.read_shard(shard)
                for row, uid in zip(naive.shard_rows(shard), metadata["uids"], strict=True):
                    tail = row["sequences"][len(row["sequences"]) - len(row["loss_mask"]) :]
                    keep = row["loss_mask"] == 1
                    advantages = row["advantages"][keep].tolist()
                    tokens += [
                        (uid, int(row["sample"]), *pair) for pair in zip(tail[keep].tolist(), advantages, strict=True)
                    ]
        return sorted(tokens), batch.plan.metrics["score_mean"]

    assert trained("prefix") == trained("tree") == trained("none")


@LAW
@given(batches_and_settings(retokenized_tail=3))
def test_a_token_is_trained_once_or_counted_as_realigned(drawn: tuple[list[Row], dict[str, Any]]) -> None:
    rows, config = drawn
    config["merge"] = "tree" if config["merge"] == "none" else config["merge"]
    plan = built(rows, config).plan
    expected = merged(rows, config)
    kept = {
        (row.steps[0]["uid"], row.steps[0]["sample"], source) for row in expected for source in row.sources if source
    }
    sampled = [(row["uid"], row["sample"], mask) for row in rows for mask in row["loss_mask"]]
    assert plan.counts["realigned_tokens"] == len(sampled) - len(kept)
    policy = [part for part in plan.mini_batches if part.model == "policy"]
    came = sum(mask for *_, mask in sampled)
    assert sum(part.loss_tokens for part in policy) == came - plan.counts["realigned_loss_tokens"]


@LAW
@given(batches_and_settings(merge="tree"))
def test_the_plan_of_a_tree_lists_the_steps_of_each_row(drawn: tuple[list[Row], dict[str, Any]]) -> None:
    rows, config = drawn
    expected = merged(rows, config)
    assert built(rows, config).plan.steps == [[step["step"] for step in row.steps] for row in expected]
    assert built(rows, config | {"merge": "prefix"}).plan.steps is None


@LAW
@given(batches_and_settings(merge="prefix"), st.integers(0, 3))
def test_a_tree_without_forks_is_what_prefix_makes(drawn: tuple[list[Row], dict[str, Any]], tail: int) -> None:
    rows, config = drawn
    config["retokenized_tail"] = tail
    tree, prefix = ([row.steps for row in naive.merged(rows, merge, tail)] for merge in ("tree", "prefix"))
    assume(tree == prefix)
    assert _bytes(rows, config | {"merge": "tree"}) == _bytes(rows, config)


@LAW
@given(batches_and_settings(), st.randoms())
def test_the_order_in_which_samples_and_steps_come_changes_no_byte(
    drawn: tuple[list[Row], dict[str, Any]], shuffler: Random
) -> None:
    rows, config = drawn
    groups = list(dict.fromkeys(row["uid"] for row in rows))
    shuffled = []
    for uid in groups:
        of_group = [row for row in rows if row["uid"] == uid]
        shuffled += shuffler.sample(of_group, len(of_group))
    assert _bytes(shuffled, config) == _bytes(rows, config)


@LAW
@given(batches_and_settings())
def test_inputs_are_never_modified_and_the_same_input_gives_the_same_bytes(
    drawn: tuple[list[Row], dict[str, Any]],
) -> None:
    rows, config = drawn
    before = copy.deepcopy(rows)
    assert _bytes(rows, config) == _bytes(rows, config)
    assert rows == before


def _bytes(rows: list[Row], config: dict[str, Any]) -> list[bytes]:
    batch = built(rows, config)
    return [naive.shard_bytes(shard) for shard in batch.shards]


@LAW
@given(batches_and_settings())
def test_every_field_of_a_shard_has_exactly_its_number_of_rows(drawn: tuple[list[Row], dict[str, Any]]) -> None:
    rows, config = drawn
    for shard in built(rows, config).shards:
        tensors, metadata = naive.read_shard(shard)
        count = len(metadata["uids"])
        per_row = ("row", "sample", "step_first", "step_last", "policy_version", "is_last_step", "is_padding")
        assert {len(tensors[name]) for name in per_row} == {count}
        assert len(metadata["stop_reasons"]) == len(metadata["rounds"]) == count
        assert sorted(p for part in metadata["micro_batches"] for p in part) == list(range(count))
        denominators = metadata["loss_denominators"]
        assert {len(denominators[name]) for name in ("row_tokens", "prompt_tokens", "trajectory_tokens")} == {count}


@LAW
@given(batches_and_settings())
def test_padding_rows_count_for_nothing_and_belong_to_no_group(drawn: tuple[list[Row], dict[str, Any]]) -> None:
    rows, config = drawn
    uids = {row["uid"] for row in rows}
    for shard in built(rows, config).shards:
        _, metadata = naive.read_shard(shard)
        for row, uid, reason in zip(naive.shard_rows(shard), metadata["uids"], metadata["stop_reasons"], strict=True):
            if not row["is_padding"]:
                continue
            assert uid not in uids
            assert reason == "padding"
            assert len(row["sequences"]) == max(2, config["pad_to_multiple_of"])
            assert set(row["sequences"].tolist()) == {config["pad_token_id"]}
            assert len(row["response_mask"]) == 0
            assert [int(row[name]) for name in ("row", "sample", "step_first", "step_last", "policy_version")] == [
                -1
            ] * 5
            assert row["is_last_step"]


@LAW
@given(rollouts(), st.integers(1, 64))
def test_optimizer_steps_do_not_depend_on_turn_counts(rows: list[Row], dp_size: int) -> None:
    groups = len({row["uid"] for row in rows})
    config = {
        "train_batch_size": groups,
        "n_samples_per_prompt": 3,
        "policy_mini_batch_size": 1,
        "update_epochs_per_batch": 2,
        "step_wise": True,
        "merge": random.Random(groups).choice(["none", "prefix", "tree"]),
        "dp_size": dp_size,
        "micro_batch": {"size": 2},
    }
    plan = built(rows, config).plan
    assert plan.optimizer_steps == groups * 2
    for part in plan.mini_batches:
        assert len({len(rank.rows) for rank in part.ranks}) == 1
        assert part.prompts == 1
