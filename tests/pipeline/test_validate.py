"""Rules that rows obey together, and the order they leave validation in."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill._wire.rows import from_rows
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import RunConfig, parse_config
from gristmill_service.pipeline.rows.validate import receive
from tests.rows import make_config, make_row
from tests.strategies import Row


def config(**overrides: Any) -> RunConfig:
    return parse_config(make_config(train_batch_size=2, n_samples_per_prompt=2) | overrides)


def row(uid: str = "p", sample: int = 0, step: int = 0, last: bool = True, **more: Any) -> Row:
    return make_row(uid=uid, sample=sample, step=step, last=last, prompt=[1], response=[2]) | more


def received(*rows: Row, **overrides: Any) -> Any:
    return receive(from_rows(rows), config(**overrides))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(sample=2)], "uid 'p' sample 2 step 0: sample 2 is not in 0..1 \\(n_samples_per_prompt: 2\\)"),
        ([row(step=1)], "uid 'p' sample 0: step 1 is there and step 0 is missing"),
        ([row(last=False), row(step=2)], "uid 'p' sample 0: step 2 is there and step 1 is missing"),
        ([row(last=False), row(last=False), row(step=1)], "uid 'p' sample 0: step 0 occurs twice"),
        ([row(last=True), row(step=1)], "uid 'p' sample 0 step 0: is_last_step is true, and later steps follow"),
        ([row(last=False)], "uid 'p' sample 0 step 0: is_last_step is false on the last step"),
        ([row(reward=None)], "uid 'p' sample 0 step 0: reward is missing"),
        ([row(advantage=1.0)], "advantage is set with advantage_estimator: grpo"),
    ],
)
def test_a_batch_that_breaks_a_rule_is_refused_naming_the_trajectory(rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        received(*rows)


def test_without_step_wise_a_trajectory_with_several_steps_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"uid 'p' sample 0: has 2 steps .* set step_wise: true"):
        received(row(last=False), row(step=1), step_wise=False)


def test_estimator_none_asks_for_advantages() -> None:
    with pytest.raises(InvalidArgumentError, match="advantage is missing with advantage_estimator: none"):
        received(row(), advantage_estimator="none")


def test_a_trajectorys_advantage_is_the_same_on_every_step() -> None:
    with pytest.raises(InvalidArgumentError, match=r"step 1: advantage 2.0 differs from 1.0 on step 0"):
        received(row(last=False, advantage=1.0), row(step=1, advantage=2.0), advantage_estimator="none")


def test_interleaved_prompts_are_regrouped_in_order_of_first_appearance_then_sample_then_step() -> None:
    accepted = received(row("b", 1), row("a", 0, 1), row("b", 0), row("a", 1), row("a", 0, 0, last=False))
    assert accepted.groups == [(0, "b"), (0, "a")]
    names = [(accepted.steps.uids[i], int(accepted.steps.samples[i]), int(accepted.steps.steps[i])) for i in range(5)]
    assert names == [("b", 0, 0), ("b", 1, 0), ("a", 0, 0), ("a", 0, 1), ("a", 1, 0)]
    assert accepted.trajectory_bounds.tolist() == [0, 1, 2, 4, 5]
    assert accepted.group_bounds.tolist() == [0, 2, 4]


def test_the_same_uid_in_another_round_is_another_group() -> None:
    accepted = received(row(), row(round=1))
    assert accepted.groups == [(0, "p"), (1, "p")]


def test_samples_may_be_missing_from_a_group() -> None:
    assert received(row(sample=1)).group_bounds.tolist() == [0, 1]
