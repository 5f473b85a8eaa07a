"""Tree merging and retokenized tails: which step joins which, what each row trains, and what the plan says of it."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill._wire.rows import from_rows
from gristmill_service.config import parse_config
from gristmill_service.pipeline import BuiltBatch, build_batch
from gristmill_service.pipeline.rows.merge import merge_rows
from gristmill_service.pipeline.rows.validate import receive
from tests import naive
from tests.pipeline.test_merge import built, merged_rows, trajectory
from tests.rows import make_config
from tests.strategies import Row

Step = tuple[list[int], list[int]]


def tree(*steps: Step, tail: int = 0, **more: Any) -> BuiltBatch:
    return built(trajectory(*steps), merge="tree", retokenized_tail=tail, **more)


def column(batch: BuiltBatch, name: str) -> list[list[float]]:
    return [row[name].tolist() for row in merged_rows(batch)]


def test_a_step_that_goes_on_from_an_earlier_one_has_a_row_with_all_of_the_path_and_trains_its_own_tokens() -> None:
    batch = tree(([1], [2]), ([1, 2, 3], [4]), ([1, 2, 5], [6]))
    assert batch.plan.steps == [[0, 1], [0, 2]]
    assert column(batch, "sequences") == [[1, 2, 3, 4], [1, 2, 5, 6]]
    assert column(batch, "loss_mask") == [[1, 0, 1], [0, 0, 1]]
    assert column(batch, "rollout_logprobs") == [[-1, 0, -1], [-1, 0, -1]]
    assert column(batch, "rewards") == [[1, 0, 2], [0, 0, 3]]
    assert [(row["step_first"], row["step_last"]) for row in merged_rows(batch)] == [(0, 1), (0, 2)]
    assert batch.plan.merge_mismatches == []


def test_a_compacted_context_begins_a_row_and_is_held_against_the_sequence_most_like_it() -> None:
    batch = tree(([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6]), ([7], [8]), ([1, 2, 3, 9, 9], [8]))
    assert batch.plan.steps == [[0, 1], [2], [3]]
    assert [(mismatch.step, mismatch.index) for mismatch in batch.plan.merge_mismatches] == [(2, 0), (3, 3)]
    # Both against the first row: one differs in its prompt, the other in its response.
    assert batch.stats().mismatches == {"prompt": 2}
    assert tree(([1, 2], [3, 4]), ([1, 2, 3, 9], [6])).stats().mismatches == {"response": 1}
    assert tree(([1, 2], [3, 4]), ([7], [8]), ([1, 2, 3], [6])).stats().mismatches == {
        "prompt": 1,
        "truncated": 1,
    }


def test_forks_are_no_mismatches() -> None:
    stats = tree(([1], [2]), ([1, 2, 3], [4]), ([1, 2, 5], [6]), ([9], [9])).stats()
    assert stats.mismatches == {"prompt": 1}
    assert stats.merged == 1


@pytest.mark.parametrize("merge", ["prefix", "tree"])
def test_a_tail_that_was_retokenized_stands_as_observation(merge: str) -> None:
    steps = ([1], [2, 3, 4]), ([1, 2, 7, 5], [6])
    batch = built(trajectory(*steps), merge=merge, retokenized_tail=2)
    assert column(batch, "sequences") == [[1, 2, 7, 5, 6]]
    assert column(batch, "loss_mask") == [[1, 0, 0, 1]]
    assert column(batch, "rollout_logprobs") == [[-1, 0, 0, -1]]
    assert column(batch, "rewards") == [[1, 0, 0, 2]]
    assert batch.plan.counts.items() >= {"realigned_tokens": 2, "realigned_loss_tokens": 2}.items()
    assert batch.plan.merge_mismatches == []
    assert batch.plan.mini_batches[0].loss_tokens == 2
    for tail in (0, 1):
        apart = built(trajectory(*steps), merge=merge, retokenized_tail=tail)
        assert apart.plan.rows == 2
        assert apart.plan.merge_mismatches[0].index == 2
        assert apart.plan.counts.get("realigned_tokens") == (0 if tail else None)


def test_realigned_tokens_that_the_client_masked_are_distinguished() -> None:
    rows = trajectory(([1], [2, 3, 4]), ([1, 2, 9], [6]))
    rows[0]["loss_mask"] = [1, 0, 1]
    counts = built(rows, retokenized_tail=2).plan.counts
    assert (counts["realigned_tokens"], counts["realigned_loss_tokens"]) == (2, 1)


def test_a_reward_with_the_kl_in_it_stands_on_the_last_token_that_is_kept() -> None:
    rows = trajectory(([1], [2, 3]), ([1, 2, 9], [4]))
    for row in rows:
        row["ref_logprobs"] = [-2.0] * len(row["response_ids"])
    config = make_config(
        merge="prefix",
        retokenized_tail=1,
        kl_from="rollout_logprobs",
        columns=[{"name": "ref_logprobs", "dtype": "float32", "scope": "response"}],
        kl_in_reward={"coef": 0.5, "estimator": "k1"},
    )
    checked = parse_config(config)
    batch = build_batch(from_rows(rows, columns=checked.columns), checked, run="r", batch=0)
    assert column(batch, "rewards") == [[0.5, 0, 1.5]]


def forked(random: Random, sample: int) -> Iterable[Row]:
    """A trajectory of few tokens, whose prompts go on from some earlier sequence, often cut."""
    steps: list[Step] = []
    for _ in range(random.randint(1, 8)):
        prompt = [random.randrange(2) for _ in range(random.randint(1, 2))]
        if steps and random.random() < 0.9:
            source = [token for part in random.choice(steps[-3:]) for token in part]
            cut = random.choice([0, 0, 1, 2, 5])
            prompt = source[: max(1, len(source) - cut)] + prompt[random.randint(0, 2) :]
        steps.append((prompt, [random.randrange(2) for _ in range(random.randint(1, 4))]))
    return trajectory(*steps, sample=sample, policy_version=0)


@settings(deadline=None, max_examples=300)
@given(
    st.integers(0, 2**32).map(Random),
    st.sampled_from(["prefix", "tree"]),
    st.sampled_from([0, 0, 1, 2, 4, 9, 2**63 - 1]),
)
def test_rows_are_those_of_the_rules_token_by_token(random: Random, merge: str, tail: int) -> None:
    given_rows = [row for sample in range(8) for row in forked(random, sample)]
    config = parse_config(
        {"train_batch_size": 1, "n_samples_per_prompt": 8, "policy_mini_batch_size": 1, "micro_batch": {"size": 1}}
        | {"step_wise": True, "merge": merge, "retokenized_tail": tail}
    )
    received = receive(from_rows(given_rows), config)
    rows = merge_rows(received, config)
    expected = naive.merged(given_rows, merge, tail)
    assert len(rows) == len(expected)
    edges = np.append(0, np.cumsum(received.steps.response_lengths))
    trained_in = {
        (merged_row.steps[0]["sample"], source): row
        for row, merged_row in enumerate(expected)
        for source, trained in zip(merged_row.sources, merged_row.trained, strict=True)
        if trained
    }
    assert rows.trained_in(edges).tolist() == [
        trained_in.get((row["sample"], (row["step"], token)), -1)
        for row in given_rows
        for token in range(len(row["response_ids"]))
    ]
    for row, merged_row in enumerate(expected):
        visits = range(int(rows.edges[row]), int(rows.edges[row + 1]))
        assert [int(received.steps.steps[rows.steps[visit]]) for visit in visits] == [
            step["step"] for step in merged_row.steps
        ]
        sources: list[tuple[int, int] | None] = [None] * int(rows.response_lengths[row])
        trained = [False] * len(sources)
        for visit in visits:
            for token in range(int(rows.kept[visit])):
                at = int(rows.starts[visit]) + token
                assert sources[at] is None
                sources[at] = (int(received.steps.steps[rows.steps[visit]]), token)
                trained[at] = token >= rows.shared[visit]
        assert (sources, trained) == (merged_row.sources, merged_row.trained)
        ends = rows.ends[visits.start : visits.stop].tolist()
        assert all(end <= start for end, start in zip(ends, rows.starts[visits.start + 1 : visits.stop], strict=False))
        assert ends[-1] == len(sources)
        owned = rows.owns_reward(received.steps.response_lengths)
        rewarded = {
            int(rows.ends[visit]) - 1: int(received.steps.steps[rows.steps[visit]]) for visit in visits if owned[visit]
        }
        assert rewarded == merged_row.rewarded
