"""The laws of the specification, over drawn batches and settings, against the rules written down a second time."""

from __future__ import annotations

import copy
import random
from random import Random
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from gristmill._wire.rows import from_rows
from gristmill_service.config import parse_config
from gristmill_service.pipeline import BuiltBatch, build_batch
from tests import naive
from tests.strategies import LAW, Row, batches_and_settings, rollouts


def built(rows: list[Row], config: dict[str, Any]) -> BuiltBatch:
    return build_batch(from_rows(rows), parse_config(config), run="r", batch=0)


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
