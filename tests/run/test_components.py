"""Components of rewards and keys of steps, through a run's rows and its log."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill.errors import AlreadyExistsError, InvalidArgumentError
from tests.run.harness import Bench, group_rows, row, table
from tests.run.test_refused_rows import submit


def test_rows_sent_again_with_other_components_are_refused() -> None:
    bench = Bench()
    bench.submit(row("a", reward_components={"x": 1.0}))
    bench.submit(row("a", reward_components={"x": 1.0}))
    with pytest.raises(AlreadyExistsError, match="different content was accepted for this step"):
        bench.submit(row("a", reward_components={"x": 2.0}))


@pytest.mark.parametrize("first", [{"reward_components": {"x": 1.0}}, {}])
def test_all_last_steps_of_a_run_have_the_same_components_or_none_also_after_a_restart(
    first: dict[str, Any],
) -> None:
    bench = Bench()
    bench.submit(row("a", **first))
    bench.reopen()
    assert bench.replayed() == bench.state
    with pytest.raises(InvalidArgumentError, match="uid 'a' sample 1 step 0: reward_components has 'y', and other"):
        bench.submit(row("a", 1, reward_components={"y": 1.0}))
    bench.submit(row("a", 1, **first))


def test_a_row_without_the_components_that_the_estimator_reads_is_refused_alone() -> None:
    bench = Bench(advantage_estimator="gdpo", component_weights={"x": 2.0})
    good = row("a", reward_components={"x": 1.0, "y": 0.0})
    other = [row("b"), row("c", reward_components={"y": 1.0}), row("d", reward_components={"x": 1.0})]
    invalid = row("e", reward_components={"x": 1.0, "y": 0.0})
    steps = table(good, *other, row("f", last=False), row("a", 1, reward_components={"x": 2.0, "y": 1.0}), invalid)
    steps.reward_components[-1] = '{"x": Infinity, "y": 0.0}'  # type: ignore[index]
    taken = submit(bench.run, steps)
    assert [outcome.name for outcome in taken.outcomes] == [
        *["ACCEPTED", "REFUSED", "REFUSED", "REFUSED", "ACCEPTED", "ACCEPTED", "REFUSED"]
    ]
    problems = [
        "uid 'b' sample 0 step 0: reward_components is missing, and advantage_estimator: gdpo reads it; send it",
        "uid 'c' sample 0 step 0: reward_components has no 'x', which component_weights names; send it",
        "uid 'd' sample 0 step 0: reward_components has 'x', and other trajectories of this run have 'x', 'y'; send",
        "uid 'e' sample 0 step 0: reward_components.x is inf; it must be finite in float32",
    ]
    for (_, error), problem in zip(sorted(taken.refused.items()), problems, strict=True):
        assert str(error).startswith(problem)
    assert bench.state.schema.components == ("x", "y")


def test_a_batch_gets_the_components_of_its_rows() -> None:
    bench = Bench(train_batch_size=1, policy_mini_batch_size=1)
    bench.submit(*group_rows("a", reward_components={"x": 1.0}))
    (batch,) = bench.state.batches
    bench.make_batches()
    assert bench.build_batch.batches[batch].reward_components == ['{"x": 1.0}'] * 2


def test_keys_of_steps_are_of_their_content_and_outlive_a_restart() -> None:
    bench = Bench(train_batch_size=1, policy_mini_batch_size=1)
    rows = group_rows("a", step_key="hall")
    bench.submit(rows[0])
    with pytest.raises(AlreadyExistsError, match="different content was accepted for this step"):
        bench.submit(rows[0] | {"step_key": "door"})
    bench.submit(*rows)
    bench.reopen()
    assert bench.replayed() == bench.state
    (batch,) = bench.state.batches
    bench.make_batches()
    assert bench.build_batch.batches[batch].step_keys == ["hall"] * 2
