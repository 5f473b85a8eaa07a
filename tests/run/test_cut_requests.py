"""What follows from calls does not depend on how clients pack them into requests."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.run.cut_requests import of_both, results
from tests.run.harness import key, row
from tests.run.machine import Machine
from tests.strategies import LAW


@settings(LAW, max_examples=4 * LAW.max_examples)
@given(st.integers(0, 1 << 32))
def test_batches_and_drops_are_the_same_however_requests_are_cut(seed: int) -> None:
    whole, in_pieces = of_both(seed)
    assert whole == in_pieces


@pytest.mark.parametrize(
    ("config", "announced"),
    [
        ({"zero_variance_filter": "replace"}, 0),
        ({"stale": "drop", "max_staleness": 1}, 5),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_a_group_is_dropped_also_where_its_request_makes_another_groups_sample_surplus(
    config: dict[str, Any], announced: int, size: int
) -> None:
    equal = 1.0 if "zero_variance_filter" in config else 0.0
    machine = Machine(surplus=1, train_batch_size=1, **config)
    machine.submit([row("a", 0, policy_version=0), row("b", 0, reward=0.0, policy_version=5)])
    machine.abort([key("a", 2)])
    machine.announce(announced)
    last = [row("a", 1, reward=equal, policy_version=0), row("b", 1, policy_version=5)]
    for begin in range(0, 2, size):
        machine.submit(last[begin : begin + size])
    batches, dropped = results(machine)
    assert [group.uid for _, groups, *_ in batches for group, _ in groups] == ["b"]
    assert [group.uid for group in dropped] == ["a"]


def test_groups_are_complete_in_the_order_of_their_last_rows_also_with_surplus() -> None:
    machine = Machine(surplus=1, train_batch_size=1)
    machine.submit([row("a", 0, reward=0.0), row("b", 0, reward=0.0)])
    machine.abort([key("b", 2)])
    machine.submit([row("a", 1), row("b", 1)])
    assert [groups[0][0].uid for _, groups, *_ in results(machine)[0]] == ["a", "b"]


def test_in_the_order_of_admission_a_group_whose_tag_is_not_known_yet_is_waited_for() -> None:
    for requests in ([[0, 1]], [[0], [1]]):
        machine = Machine(
            train_batch_size=1,
            n_samples_per_prompt=1,
            seal_order="admission",
            tag_shares={"x": {"min": 1.0}},
            tag_timeout_s=5.0,
        )
        machine.begin({"a": "", "b": "x"})
        rows = [row("b", tag="x"), row("a", tag="x")]
        for request in requests:
            machine.submit([rows[index] for index in request])
        assert [groups[0][0].uid for _, groups, *_ in results(machine)[0]] == ["a", "b"]
