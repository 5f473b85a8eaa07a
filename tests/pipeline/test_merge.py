"""Prefix-aware merging: who joins, and what is said of those who do not."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gristmill._wire.columns import Ragged
from gristmill._wire.rows import from_rows
from gristmill_service.config import parse_config
from gristmill_service.pipeline import BuiltBatch, build_batch
from gristmill_service.pipeline.plan_document import MismatchDocument
from gristmill_service.pipeline.rows.joins import extends
from tests import naive
from tests.rows import make_config, make_row
from tests.strategies import Row


def trajectory(*steps: tuple[list[int], list[int]], **more: Any) -> list[Row]:
    """Rows of one trajectory from (prompt, response) pairs."""
    return [
        make_row(
            uid="p",
            step=index,
            last=index == len(steps) - 1,
            prompt=prompt,
            response=response,
            rollout_logprobs=[-1.0] * len(response),
            reward=float(index + 1),
            stop_reason=f"reason {index}",
            policy_version=5 - index,
        )
        | more
        for index, (prompt, response) in enumerate(steps)
    ]


def built(rows: list[Row], **overrides: Any) -> BuiltBatch:
    config = make_config(merge="prefix")
    return build_batch(from_rows(rows), parse_config(config | overrides), run="r", batch=0)


def merged_rows(batch: BuiltBatch) -> list[Row]:
    return [row for shard in batch.shards for row in naive.shard_rows(shard)]


def test_steps_that_extend_each_other_become_one_row_with_observations_untrained() -> None:
    batch = built(trajectory(([1, 2], [3, 4]), ([1, 2, 3, 4, 9], [5])))
    (row,) = merged_rows(batch)
    assert row["sequences"].tolist() == [1, 2, 3, 4, 9, 5]
    assert row["response_mask"].tolist() == [1, 1, 1, 1]
    assert row["loss_mask"].tolist() == [1, 1, 0, 1]
    assert row["rollout_logprobs"].tolist() == [-1, -1, 0, -1]
    assert row["rewards"].tolist() == [0, 1, 0, 2]
    assert (row["step_first"], row["step_last"], row["policy_version"]) == (0, 1, 4)
    assert (batch.plan.rows_received, batch.plan.rows) == (2, 1)


def test_a_mismatch_says_where_in_the_steps_prompt_the_first_token_differs() -> None:
    batch = built(trajectory(([1, 2], [3]), ([1, 7, 3, 4], [4])))
    assert batch.plan.merge_mismatches == [MismatchDocument("p", 0, 0, step=1, index=1, cause="prompt")]


def test_a_prompt_that_is_merely_too_short_is_reported_at_its_length() -> None:
    batch = built(trajectory(([1, 2], [3, 4]), ([1, 2, 3], [4])))
    assert batch.plan.merge_mismatches[0].index == 3


def test_only_the_first_three_mismatches_of_a_trajectory_are_reported() -> None:
    batch = built(trajectory(*(([step + 1], [9]) for step in range(6))))
    assert [mismatch.step for mismatch in batch.plan.merge_mismatches] == [1, 2, 3]


def test_a_clients_advantages_per_token_are_zero_on_observations() -> None:
    rows = trajectory(([1], [2, 3]), ([1, 2, 3, 8, 8], [4]))
    for index, row in enumerate(rows):
        row["advantage"] = [index + 0.5] * len(row["response_ids"])
    (row,) = merged_rows(built(rows, advantage_estimator="none"))
    assert row["advantages"].tolist() == [0.5, 0.5, 0, 0, 1.5]
    (row,) = merged_rows(built(rows, advantage_estimator="none", loss_reduction="token_mean"))
    assert [round(float(value), 6) for value in row["advantages"]] == [0.166667, 0.166667, 0, 0, 0.5]


# Rows that often are beginnings of each other, and rows that only nearly are.
row_lists = st.lists(st.integers(0, 1), max_size=6).flatmap(
    lambda tokens: st.lists(
        st.integers(1, len(tokens) + 1).map(lambda length: [*tokens, 7][:length]) | st.just([0]), max_size=8
    )
)


@given(row_lists.flatmap(lambda rows: st.tuples(st.just(rows), st.permutations(range(len(rows))), st.data())))
def test_a_row_extends_the_one_before_it_when_it_begins_with_all_of_it_wherever_they_stand(drawn: Any) -> None:
    rows, places, data = drawn
    allowed = np.array(
        [
            index > 0 and len(rows[index - 1]) <= len(rows[index]) and data.draw(st.booleans())
            for index in range(len(rows))
        ],
        np.bool_,
    )
    # In memory in another order than in the batch, as a sealed batch's rows are.
    stored = Ragged.from_arrays([np.array(rows[place], np.int32) for place in places], np.int32)
    tokens = stored.take(np.argsort(np.array(places, np.int64)))
    expected = [
        bool(fits) and rows[index][: len(rows[index - 1])] == rows[index - 1] for index, fits in enumerate(allowed)
    ]
    assert extends(tokens, allowed).tolist() == expected


def test_steps_masked_in_part_are_counted_as_those_masked_in_full_are() -> None:
    steps = trajectory(([1], [2, 3]), ([1, 2, 3], [4]), ([9], [5, 6]))
    steps[0]["loss_mask"] = [0, 1]
    batch = built(steps, loss_reduction="token_mean")
    assert batch.plan.mini_batches[0].loss_tokens == 4
