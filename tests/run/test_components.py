"""Components of rewards and keys of steps, through a run's rows and its log."""

from __future__ import annotations

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


def test_all_last_steps_have_the_same_components_where_the_estimator_compares_them_also_after_a_restart() -> None:
    bench = Bench(advantage_estimator="gdpo")
    bench.submit(row("a", reward_components={"x": 1.0}))
    bench.reopen()
    assert bench.replayed() == bench.state
    with pytest.raises(InvalidArgumentError, match="uid 'a' sample 1 step 0: reward_components has 'y', and other"):
        bench.submit(row("a", 1, reward_components={"y": 1.0}))
    bench.submit(row("a", 1, reward_components={"x": 0.5}))


def test_components_may_differ_where_no_estimator_compares_them_and_a_run_has_at_most_64_names() -> None:
    bench = Bench(train_batch_size=100)
    for number in range(32):
        first, second = group_rows(f"a{number}")
        components = {f"x{number}": 1.0, f"y{number}": 0.0}
        assert bench.submit(first, second | {"reward_components": components}) == ["ACCEPTED"] * 2
    bench.reopen()
    with pytest.raises(InvalidArgumentError, match="uid 'b' sample 0 step 0: reward_components has 'z', which would"):
        bench.submit(row("b", reward_components={"z": 1.0, "x7": 1.0}))
    assert bench.submit(row("b", reward_components={"y31": 1.0, "x7": 1.0})) == ["ACCEPTED"]


def test_a_row_without_the_components_that_the_estimator_reads_is_refused_alone() -> None:
    bench = Bench(advantage_estimator="gdpo", component_weights={"x": 2.0, "y": 1.0})
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
        "uid 'c' sample 0 step 0: reward_components has 'y', and component_weights has 'x', 'y'; set a weight",
        "uid 'd' sample 0 step 0: reward_components has 'x', and component_weights has 'x', 'y'; set a weight",
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


@pytest.mark.parametrize("field", ["step_key", "agent", "episode", "partition"])
def test_strings_of_rows_are_of_their_content_and_outlive_a_restart(field: str) -> None:
    bench = Bench(train_batch_size=1, policy_mini_batch_size=1)
    rows = [one | {field: "hall"} for one in group_rows("a")]
    bench.submit(rows[0])
    with pytest.raises(AlreadyExistsError, match="different content was accepted for this step"):
        bench.submit(rows[0] | {field: "door"})
    bench.submit(*rows)
    bench.reopen()
    assert bench.replayed() == bench.state
    (batch,) = bench.state.batches
    bench.make_batches()
    assert getattr(bench.build_batch.batches[batch], f"{field}s") == ["hall"] * 2


@pytest.mark.parametrize("field", ["tag", "step_key", "agent", "episode", "partition"])
def test_long_strings_count_as_bytes_of_their_rows(field: str) -> None:
    sizes = []
    for text in ("", "x" * 100):
        bench = Bench()
        bench.submit(row("a") | {field: text})
        sizes.append(bench.state.row_bytes)
    assert sizes[1] - sizes[0] == 100


@pytest.mark.parametrize("field", ["agent", "episode"])
def test_a_trajectory_has_one_agent_and_one_episode(field: str) -> None:
    bench = Bench(step_wise=True)
    rows = [row("a", step=step, last=step == 1) | {field: "solver"} for step in range(2)]
    bench.submit(rows[0])
    refusal = f"sample 0 step 1: {field} 'judge' differs from 'solver' on step 0; send the same on every step"
    with pytest.raises(InvalidArgumentError, match=refusal):
        bench.submit(rows[1] | {field: "judge"})
    bench.submit(rows[1])


def test_a_partition_is_refused_when_it_is_sent_where_a_mini_batch_is_a_number_of_rows() -> None:
    bench = Bench(mini_batch_unit="sequence", micro_batch={"size": 1})
    with pytest.raises(InvalidArgumentError, match=r"sample 0 step 0: partition 'sft' .* mini_batch_unit: prompt"):
        bench.submit(*group_rows("a", partition="sft"))
    assert bench.submit(*group_rows("a")) == ["ACCEPTED"] * 2


@pytest.mark.parametrize("field", ["agent", "partition"])
def test_a_run_has_at_most_64_agents_and_64_partitions(field: str) -> None:
    bench = Bench(train_batch_size=100)
    for number in range(64):
        bench.submit(*(one | {field: f"r{number}"} for one in group_rows(f"a{number}")))
    bench.reopen()
    refusal = f"{field} 'r64' would be one more than the 64 {field}s that a run may have"
    with pytest.raises(InvalidArgumentError, match=refusal):
        bench.submit(*(one | {field: "r64"} for one in group_rows("b")))
    bench.submit(*(one | {field: "r63"} for one in group_rows("b")))
