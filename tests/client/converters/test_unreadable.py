"""Data that no framework makes is refused by name, whatever is wrong with it, and never fails otherwise."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

from gristmill.converters import from_prime_rl, from_skyrl, from_slime, from_trl, from_trl_async, from_verl
from gristmill.errors import InvalidArgumentError
from tests.client.converters import recorded
from tests.client.converters.test_slime import sample

WRONG: list[Any] = [
    *(None, 0, -1, 1.5, float("nan"), float("inf"), True, 2**70, "x", b"x", [], [[]], {}, {"a": 1}, [None], ["a"]),
    *(np.array(5), np.array([]), np.zeros((0, 3)), np.array(["a"]), torch.tensor(3), torch.zeros(2, 2, 2), object()),
]


def verl(draw: random.Random) -> None:
    batch = recorded.verl_batch()
    spoil(draw.choice([batch.batch, batch.non_tensor_batch]), draw)
    from_verl(batch, ignore=["routed_experts"])


def trl(draw: random.Random) -> None:
    output, count = recorded.trl_output(), len(recorded.trl_output()["prompt_ids"])
    given: dict[str, Any] = {"uids": [str(row) for row in range(count)], "rewards": [1.0] * count}
    spoil(draw.choice([output, given]), draw)
    from_trl(output, **given)


def trl_async(draw: random.Random) -> None:
    samples = recorded.trl_samples()
    spoil(vars(draw.choice(samples)), draw)
    from_trl_async(samples, num_generations=1)


def slime(draw: random.Random) -> None:
    samples = [sample(4), sample(5)]
    spoil(vars(draw.choice(samples)), draw)
    from_slime(samples)


def spoil(values: dict[str, Any], draw: random.Random) -> None:
    name = draw.choice(sorted(values))
    value = values[name]
    if isinstance(value, (list, np.ndarray)) and np.ndim(value) and draw.random() < 0.5:
        values[name] = draw.choice([value[:-1], value[:0], [*value, *value], [value]])
    else:
        values[name] = draw.choice(WRONG)


@pytest.mark.parametrize("convert", [verl, trl, trl_async, slime])
def test_data_with_anything_in_place_of_a_part_is_taken_or_refused(convert: Callable[[random.Random], None]) -> None:
    refused = 0
    for seed in range(400):
        try:
            convert(random.Random(seed))
        except InvalidArgumentError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: type(wrong).__name__)
@pytest.mark.parametrize(
    "convert",
    [
        from_verl,
        from_slime,
        lambda data: from_skyrl(data),
        lambda data: from_trl(data, uids=["a"], rewards=[1.0]),
        lambda data: from_trl_async(data, num_generations=1),
        lambda data: from_prime_rl(data, uids=["a"], rewards=[1.0]),
    ],
)
def test_what_is_no_data_at_all_is_refused(convert: Callable[[Any], list[Any]], wrong: Any) -> None:
    with suppress(InvalidArgumentError):
        assert convert(wrong) == []


def test_a_call_that_is_none_is_the_callers_mistake() -> None:
    with pytest.raises(TypeError, match="num_generations"):
        from_trl_async([])  # type: ignore[call-arg]


def test_prompts_and_completions_of_other_rows_are_refused_with_both_counts() -> None:
    output = recorded.trl_output()
    for name in ("completion_ids", "completion_mask", "tool_mask", "sampling_per_token_logps"):
        if name in output:
            output[name] = np.concatenate([output[name], output[name]])
    count = len(output["prompt_ids"])
    with pytest.raises(InvalidArgumentError, match=f"{count} .*{2 * count}|{2 * count}.*{count}"):
        from_trl(output, uids=[str(row) for row in range(count)], rewards=[1.0] * count)
