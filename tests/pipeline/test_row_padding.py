"""`pad_rows_to_multiple_of` and `pad_packed_to`: padding after rows on a token axis."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill._wire.rows import from_rows
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import parse_config
from gristmill_service.pipeline import BuiltBatch, build_batch
from tests import naive
from tests.pipeline import trees
from tests.rows import make_config, make_row
from tests.strategies import LAW, Row


def rows(*lengths: tuple[int, int], **more: Any) -> list[Row]:
    return [
        make_row(uid=f"p{index}", prompt=[7] * prompt, response=[8] * response) | more
        for index, (prompt, response) in enumerate(lengths)
    ]


def built(given_rows: list[Row], **overrides: Any) -> BuiltBatch:
    groups = len({row["uid"] for row in given_rows})
    config = make_config(train_batch_size=groups, policy_mini_batch_size=groups, dp_size=1, step_wise=False)
    config |= {"layout": "packed", "micro_batch": {"max_tokens": 64}, "pad_token_id": 99} | overrides
    checked = parse_config(config)
    steps = from_rows(given_rows, step_wise=checked.step_wise, columns=checked.columns)
    return build_batch(steps, checked, run="r", batch=0)


def axis(batch: BuiltBatch, micro_batch: int = 0) -> dict[str, list[Any]]:
    tensors, _ = naive.read_shard(batch.shards[0])
    prefix = f"micro_batch_{micro_batch:03d}/"
    return {name.removeprefix(prefix): tensor.tolist() for name, tensor in tensors.items() if name.startswith(prefix)}


def test_each_packed_row_is_padded_to_the_multiple() -> None:
    columns = axis(built(rows((2, 2), (3, 2)), pad_rows_to_multiple_of=4))
    assert columns["sequences"] == [7, 7, 8, 8, 7, 7, 7, 8, 8, 99, 99, 99]
    assert columns["position_ids"] == [0, 1, 2, 3, *range(8)]
    assert columns["loss_mask"] == columns["response_mask"] == [0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0]
    assert columns["rewards"] == [0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0]
    assert (columns["cu_seqlens"], columns["cu_seqlens_padded"]) == ([0, 4, 9], [0, 4, 12])


def test_without_padding_there_are_no_padded_offsets() -> None:
    assert "cu_seqlens_padded" not in axis(built(rows((2, 2), (3, 2))))


def test_padding_rows_are_padded_too() -> None:
    batch = built(rows((2, 2)), pad_rows_to_multiple_of=4, dp_size=2)
    tensors, _ = naive.read_shard(batch.shards[1])
    assert tensors["is_padding"].tolist() == [1]
    assert tensors["micro_batch_000/sequences"].tolist() == [99] * 4
    assert tensors["micro_batch_000/cu_seqlens"].tolist() == [0, 2]


def test_declared_columns_have_their_fill_on_padding() -> None:
    columns = [
        {"name": "route", "dtype": "int16", "scope": "token", "fill": -1},
        {"name": "teacher", "dtype": "float32", "scope": "response", "fill": 5},
        {"name": "kept", "dtype": "int32", "scope": "response", "shape": [None]},
    ]
    given_rows = rows((1, 2), (1, 1))
    for row in given_rows:
        count = len(row["response_ids"])
        row |= {"route": [4] * (1 + count), "teacher": [0.5] * count, "kept": [[1, 2]] * count}
    laid_out = axis(built(given_rows, columns=columns, pad_rows_to_multiple_of=4))
    assert laid_out["route"] == [4, 4, 4, -1, 4, 4, -1, -1]
    assert laid_out["teacher"] == [5, 0.5, 0.5, 5, 5, 0.5, 5, 5]
    assert laid_out["kept_offsets"] == [0, 0, 2, 4, 4, 4, 6, 6, 6]


def test_caps_count_padding() -> None:
    plain = built(rows((2, 3), (2, 3)), micro_batch={"max_tokens": 10})
    padded = built(rows((2, 3), (2, 3)), micro_batch={"max_tokens": 10}, pad_rows_to_multiple_of=8)
    assert len(plain.plan.mini_batches[0].ranks[0].micro_batches) == 1
    assert len(padded.plan.mini_batches[0].ranks[0].micro_batches) == 2


def test_a_token_axis_has_one_of_the_sizes() -> None:
    batch = built(rows((2, 3), (2, 9), (20, 1)), micro_batch={"max_tokens": 16}, pad_packed_to=[32, 16])
    first, second = axis(batch), axis(batch, 1)
    assert (len(first["sequences"]), len(second["sequences"])) == (16, 32)
    assert (first["cu_seqlens"], first["cu_seqlens_padded"]) == ([0, 5, 16], [0, 5, 16])
    assert (second["cu_seqlens"], second["cu_seqlens_padded"]) == ([0, 21], [0, 32])
    assert batch.plan.metrics["padding_tokens"] == 11


def test_a_row_that_no_size_holds_is_refused() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"'p1'.* 15 tokens are padded to 16, and the largest .* is 12; send"
    ):
        built(rows((2, 3), (2, 13)), micro_batch={"max_tokens": 8}, pad_packed_to=[12], pad_rows_to_multiple_of=4)


def test_in_a_tree_the_tokens_up_to_each_leaf_are_padded() -> None:
    samples = [
        make_row(uid="a", sample=0, prompt=[1, 2, 3], response=[4, 5]),
        make_row(uid="a", sample=1, prompt=[1, 2, 3], response=[6]),
    ]
    columns = axis(built(samples, n_samples_per_prompt=2, layout="prefix_tree", pad_rows_to_multiple_of=4))
    assert columns["sequences"] == [1, 2, 3, 4, 5, 99, 99, 99, 6, 99, 99, 99]
    assert columns["position_ids"] == [0, 1, 2, 3, 4, 5, 6, 7, 3, 4, 5, 6]
    assert columns["parents"] == [-1, 0, 1, 2, 3, 4, 5, 6, 2, 8, 9, 10]
    assert columns["row_ends"] == [4, 8]
    assert (columns["segment_starts"], columns["segment_parents"]) == ([0, 3, 8], [-1, 0, 0])


def test_a_row_that_the_next_one_continues_is_not_padded() -> None:
    turns = [
        make_row(step=0, is_last_step=False, prompt=[1, 2], response=[3]),
        make_row(step=1, prompt=[1, 2, 3], response=[4, 5]),
    ]
    columns = axis(built(turns, step_wise=True, layout="prefix_tree", pad_rows_to_multiple_of=8))
    assert columns["sequences"] == [1, 2, 3, 4, 5, 99, 99, 99]
    assert columns["row_ends"] == [2, 4]


@LAW
@given(st.integers(0, 2**32).map(Random), st.sampled_from([2, 8]))
def test_padded_trees_have_whole_multiples_under_the_cap_and_the_same_rows(random: Random, multiple: int) -> None:
    given_rows = trees.rollouts(random)
    config = trees.settings(random, given_rows, mini_batch_unit="prompt", on_misaligned="pad")
    config |= {"pad_rows_to_multiple_of": multiple, "micro_batch": {"max_tokens": random.randint(8, 60)}}
    config["policy_mini_batch_size"] = config["train_batch_size"]
    config.pop("critic_mini_batch_size", None)
    checked = parse_config(config)
    cap = checked.token_cap or 0
    for shard in build_batch(from_rows(given_rows), checked, run="r", batch=0).shards:
        tensors, metadata = naive.read_shard(shard)
        for index, places in enumerate(metadata["micro_batches"]):
            tokens, parents, ends, positions = (
                tensors[f"micro_batch_{index:03d}/{name}"]
                for name in ("sequences", "parents", "row_ends", "position_ids")
            )
            assert len(tokens) % multiple == 0
            assert len(places) == 1 or len(tokens) <= cap
            assert (positions == np.where(parents < 0, 0, positions[parents] + 1)).all()
            on_paths = set[int]()
            for end in ends.tolist():
                while end >= 0:
                    on_paths.add(end)
                    end = int(parents[end])
            padding = sorted(set(range(len(tokens))) - on_paths)
            assert (tokens[padding] == checked.pad_token_id).all()
            assert not tensors[f"micro_batch_{index:03d}/loss_mask"][padding].any()
