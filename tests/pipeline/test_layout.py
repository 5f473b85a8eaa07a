"""Layouts: widths, alignment, and files that the safetensors library reads."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load

from gristmill._wire.rows import from_rows
from gristmill_service.config import parse_config
from gristmill_service.pipeline import BuiltBatch, build_batch
from gristmill_service.pipeline.layout.columns import CONSTANTS
from tests import naive
from tests.rows import make_config, make_row
from tests.strategies import LAW, Row, batches_and_settings

PADDED = ("sequences", "attention_mask", "response_mask", "loss_mask", "rewards", "advantages")


def rows(*lengths: tuple[int, int]) -> list[Row]:
    """One single-step prompt a (prompt, response) pair of lengths."""
    return [
        make_row(uid=f"p{index}", prompt=[7] * prompt, response=[8] * response)
        for index, (prompt, response) in enumerate(lengths)
    ]


def built(given: list[Row], **overrides: Any) -> BuiltBatch:
    config = make_config(train_batch_size=len(given), policy_mini_batch_size=2, dp_size=2, step_wise=False)
    return build_batch(from_rows(given, step_wise=False), parse_config(config | overrides), run="r", batch=0)


def shapes(batch: BuiltBatch, name: str = "sequences") -> dict[tuple[int, int], tuple[int, ...]]:
    return {
        (shard.address.mini_batch, shard.address.rank): naive.read_shard(shard)[0][name].shape for shard in batch.shards
    }


# Two mini-batches of two rows; rank 0 has the first of each, rank 1 the second.
FOUR = rows((2, 1), (1, 6), (9, 2), (1, 1))


def test_the_whole_of_prompt_and_response_decides_the_width_not_each_longest_alone() -> None:
    batch = built(rows((9, 1), (1, 9)), dp_size=1)
    assert shapes(batch) == {(0, 0): (2, 10)}
    assert shapes(batch, "loss_mask") == {(0, 0): (2, 9)}


@pytest.mark.parametrize(
    ("pad_width", "sequences", "responses"),
    [
        ("batch", [11, 11, 11, 11], [6, 6, 6, 6]),
        ("mini_batch", [7, 7, 11, 11], [6, 6, 2, 2]),
        ("shard", [3, 7, 11, 2], [1, 6, 2, 1]),
    ],
)
def test_pad_width_says_over_which_rows_the_widest_is_taken(
    pad_width: str, sequences: list[int], responses: list[int]
) -> None:
    batch = built(FOUR, pad_width=pad_width)
    assert [shape[1] for shape in shapes(batch).values()] == sequences
    assert [shape[1] for shape in shapes(batch, "response_mask").values()] == responses


def test_pad_width_micro_batch_gives_each_micro_batch_its_own_tensors() -> None:
    batch = built(rows((2, 1), (1, 6)), dp_size=1, pad_width="micro_batch")
    tensors, _ = naive.read_shard(batch.shards[0])
    assert tensors["micro_batch_000/sequences"].shape == (1, 3)
    assert tensors["micro_batch_001/sequences"].shape == (1, 7)
    assert tensors["micro_batch_001/loss_mask"].shape == (1, 6)
    assert tensors["row"].tolist() == [0, 1]
    assert "sequences" not in tensors


def test_pad_to_multiple_of_rounds_both_widths_up() -> None:
    batch = built(FOUR, pad_width="batch", pad_to_multiple_of=8)
    assert set(shapes(batch).values()) == {(1, 16)}
    assert set(shapes(batch, "rewards").values()) == {(1, 8)}


def test_padding_rows_take_part_in_the_width() -> None:
    batch = built(rows((1, 1)), dp_size=2, policy_mini_batch_size=1, pad_to_multiple_of=4)
    assert shapes(batch) == {(0, 0): (1, 4), (0, 1): (1, 4)}


def test_nothing_is_truncated_above_max_seq_len_and_it_is_counted() -> None:
    batch = built(rows((9, 9), (1, 1)), dp_size=1, max_seq_len=4)
    assert shapes(batch) == {(0, 0): (2, 18)}
    assert batch.plan.counts["rows_over_max_seq_len"] == 1


def test_a_row_is_one_block_at_the_right_end() -> None:
    batch = built(rows((2, 2), (5, 1)), dp_size=1, pad_token_id=99)
    tensors, _ = naive.read_shard(batch.shards[0])
    assert tensors["sequences"][0].tolist() == [99, 99, 7, 7, 8, 8]
    assert tensors["attention_mask"][0].tolist() == [0, 0, 1, 1, 1, 1]
    assert tensors["response_mask"].tolist() == [[1, 1], [0, 1]]
    assert tensors["rewards"].tolist() == [[0, 1], [0, 1]]


def test_packed_columns_share_one_token_axis_and_stand_on_their_own_tokens() -> None:
    batch = built(rows((2, 2), (3, 1)), dp_size=1, layout="packed", micro_batch={"max_tokens": 100})
    tensors, _ = naive.read_shard(batch.shards[0])
    columns = {name.removeprefix("micro_batch_000/"): tensor.tolist() for name, tensor in tensors.items()}
    assert columns["sequences"] == [7, 7, 8, 8, 7, 7, 7, 8]
    assert columns["cu_seqlens"] == [0, 4, 8]
    assert columns["position_ids"] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert columns["response_mask"] == columns["loss_mask"] == [0, 0, 1, 1, 0, 0, 0, 1]
    assert columns["rewards"] == [0, 0, 0, 1, 0, 0, 0, 1]
    assert "attention_mask" not in columns


@LAW
@given(batches_and_settings())
def test_files_are_whole_safetensors_with_the_specified_names_types_and_alignment(
    drawn: tuple[list[Row], dict[str, Any]],
) -> None:
    given_rows, config = drawn
    batch = build_batch(from_rows(given_rows), parse_config(config), run="r", batch=3)
    for shard in batch.shards:
        data = naive.shard_bytes(shard)
        tensors = load(data)
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        metadata = {name: json.loads(text) for name, text in header.pop("__metadata__").items()}
        for name, entry in header.items():
            start = entry["data_offsets"][0]
            assert (8 + size + start) % (4 if entry["dtype"] in ("I32", "F32") else 1) == 0
            column = name.rpartition("/")[2]
            masks = ("attention_mask", "response_mask", "loss_mask", "is_last_step", "is_padding")
            floats = ("rewards", "advantages", "rollout_logprobs")
            want = np.uint8 if column in masks else np.float32 if column in floats else np.int32
            assert tensors[name].dtype == want, name
        assert (metadata["run"], metadata["batch"], metadata["dp_size"]) == ("r", 3, config["dp_size"])
        address = (metadata["model"], metadata["mini_batch"], metadata["rank"])
        assert address == (shard.address.model, shard.address.mini_batch, shard.address.rank)


@LAW
@given(batches_and_settings(pad_rows_to_multiple_of=1), st.data())
def test_the_layout_never_changes_the_plan(drawn: tuple[list[Row], dict[str, Any]], data: st.DataObject) -> None:
    given_rows, config = drawn
    other = config | {
        "layout": data.draw(st.sampled_from(["left_padded", "packed"])),
        "pad_width": data.draw(st.sampled_from(["batch", "mini_batch", "shard", "micro_batch"])),
    }
    plans = [build_batch(from_rows(given_rows), parse_config(c), run="r", batch=0).plan for c in (config, other)]
    assert plans[0].mini_batches == plans[1].mini_batches


def test_padding_share_is_what_the_tensors_hold() -> None:
    batch = built(FOUR, pad_width="batch")
    elements = sum(naive.read_shard(shard)[0]["sequences"].size for shard in batch.shards)
    tokens = sum(len(row["prompt_token_ids"]) + len(row["response_ids"]) for row in FOUR)
    assert batch.plan.metrics["padding_share"] == pytest.approx(1 - tokens / elements)


@pytest.mark.parametrize("overrides", [{}, {"layout": "packed"}, {"pad_width": "micro_batch"}])
def test_a_rows_advantage_stands_on_each_of_its_tokens_however_many(overrides: dict[str, Any]) -> None:
    lengths = [1, 2, CONSTANTS - 1, CONSTANTS, CONSTANTS + 1, 2 * CONSTANTS, 5 * CONSTANTS + 3, 1]
    given_rows = [
        {**row, "advantage": (-0.0, 0.0, 1.5, 1.5)[index % 4]}
        for index, row in enumerate(rows(*((3, length) for length in lengths)))
    ]
    batch = built(given_rows, advantage_estimator="none", policy_mini_batch_size=8, **overrides)
    advantages = {}
    for shard in batch.shards:
        for row in naive.shard_rows(shard):
            advantages[int(row["row"])] = row["advantages"]
    for index, length in enumerate(lengths):
        expected = np.full(length, given_rows[index]["advantage"], np.float32)
        assert advantages[index].tobytes() == expected.tobytes()


def test_steps_without_a_reward_are_fill_between_those_that_have_one() -> None:
    rewards = [0.0, 2.0, -0.0, 0.0, 3.0, 0.0]
    steps = [
        make_row(
            uid="p",
            step=index,
            last=index == len(rewards) - 1,
            prompt=[*range(1, 2 + 3 * index)],
            response=[2 + 3 * index, 3 + 3 * index],
            reward=reward,
        )
        for index, reward in enumerate(rewards)
    ]
    config = parse_config(make_config(merge="prefix"))
    table = replace(from_rows(steps), rewards=np.array(rewards))
    (shard,) = build_batch(table, config, run="r", batch=0).shards
    (row,) = naive.shard_rows(shard)
    # Two response tokens a step, and an observation of one between steps.
    expected = np.array([0, 0, 0, 0, 2, 0, 0, -0.0, 0, 0, 0, 0, 0, 3, 0, 0, 0], np.float32)
    assert row["rewards"].tobytes() == expected.tobytes()


@given(st.integers(1, 5), st.sampled_from(["batch", "mini_batch", "shard"]))
def test_shards_of_a_batch_name_their_own_rows(dp_size: int, pad_width: str) -> None:
    batch = built(rows(*((2, index % 4 + 1) for index in range(6))), dp_size=dp_size, pad_width=pad_width)
    for part in batch.plan.mini_batches:
        for rank in part.ranks:
            (shard,) = (
                shard
                for shard in batch.shards
                if (shard.address.mini_batch, shard.address.rank) == (part.index, rank.rank)
            )
            tensors, metadata = naive.read_shard(shard)
            assert tensors["row"].tolist() == rank.rows
            assert metadata["uids"] == ["padding" if row < 0 else f"p{row}" for row in rank.rows]
            assert metadata["micro_batches"] == rank.micro_batches
            assert metadata["loss_denominators"]["row_tokens"] == [
                max(1, row % 4 + 1) if row >= 0 else 1 for row in rank.rows
            ]


@pytest.mark.parametrize("balance", ["none", "tokens"])
def test_the_largest_settings_that_are_accepted_are_carried_out(balance: str) -> None:
    most = 2**63 - 1
    batch = built(
        FOUR,
        micro_batch={"max_tokens": most},
        cp_size=2,
        max_seq_len=most,
        loss_reduction="seq_mean_token_sum_norm",
        max_staleness=most,
        balance=balance,
    )
    assert batch.plan.counts["rows_over_max_seq_len"] == 0
    (advantage,) = {row["advantages"][0] for shard in batch.shards for row in naive.shard_rows(shard)}
    assert advantage == np.float32(1 / (1 + 1e-6) / (2 * most))
