"""Environments that frameworks name become the tags of rows, one for each that is handed over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gristmill._wire.rows import from_rows
from gristmill.converters import from_prime_rl, from_skyrl, from_slime, from_trl, from_trl_async, from_verl
from gristmill.errors import InvalidArgumentError
from tests.client.converters import recorded, stand_ins

Rows = list[dict[str, Any]]


def skyrl(**options: Any) -> Rows:
    ids, output = recorded.skyrl_output("whole")
    return from_skyrl(output, trajectory_ids=ids, **options)


def verl(**options: Any) -> Rows:
    return from_verl(recorded.verl_batch(), ignore=["routed_experts"], **options)


def slime(**options: Any) -> Rows:
    made: dict[str, Any] = {"tokens": [1, 2, 3], "response_length": 1, "reward": 1.0}
    made |= {"status": stand_ins.Status.COMPLETED, "group_index": 0}
    return from_slime([[stand_ins.Sample(index=index, **made) for index in range(2)]], **options)


def trl(**options: Any) -> Rows:
    return from_trl(recorded.trl_output(), uids=[1, 2], num_generations=2, rewards=[1.0, 0.0, 1.0, 0.0], **options)


def trl_async(**options: Any) -> Rows:
    return from_trl_async(recorded.trl_samples(), num_generations=2, **options)


def prime_rl(**options: Any) -> Rows:
    sample = stand_ins.TrainingSample([1, 2, 3], [False, True, True], [0.0, -0.5, -0.5], [1.0] * 3, "math")
    return from_prime_rl([[sample, sample], sample], uids=["a", "a"], rewards=[1.0, 0.0], **options)


CONVERTERS: dict[Callable[..., Rows], int] = {skyrl: 4, verl: 3, slime: 2, trl: 4, trl_async: 2, prime_rl: 2}
"""The number of rows, samples or traces that each converter gets."""


@pytest.mark.parametrize("convert", CONVERTERS)
def test_tags_are_those_of_the_rows_they_were_given_for(convert: Callable[..., Rows]) -> None:
    tags = np.array([f"task {place}" if place else None for place in range(CONVERTERS[convert])], object)
    rows, plain = convert(tags=tags), convert()
    counts = [2, 1] if convert is prime_rl else [1] * len(tags)
    assert [row.pop("tag", "") for row in rows] == [
        tag or "" for tag, count in zip(tags, counts, strict=True) for _ in range(count)
    ]
    assert from_rows(rows).uids == from_rows(plain).uids
    assert not any("tag" in row for row in plain)


@pytest.mark.parametrize("convert", CONVERTERS)
def test_tags_that_are_not_one_for_each_are_refused(convert: Callable[..., Rows]) -> None:
    count = CONVERTERS[convert]
    for tags, message in (
        (["math"] * (count + 1), f"tags has {count + 1} entries for {count} rows"),
        ("math", "tags is the string 'math'"),
        ([3] * count, r"tags\[0\] is 3"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            convert(tags=tags)


def test_the_steps_of_a_queue_keep_the_tags_of_their_rows_in_whatever_order() -> None:
    keys, rows = recorded.verl_queue()
    tags = [key.rsplit("_", 2)[0] for key in keys]
    converted = from_verl(rows, keys=keys, tags=tags, ignore=["routed_experts"])
    assert [row["tag"] for row in converted] == [row["uid"] for row in converted]
