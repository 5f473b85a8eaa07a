"""What batches become with a configuration is what its plans and shards have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gristmill._wire.rows import from_rows
from gristmill._wire.steps import Steps
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import parse_config
from gristmill_service.pipeline import build_batch
from gristmill_service.pipeline.outcome import first_breaks, outcome_of
from tests import naive
from tests.rows import make_config, make_row
from tests.strategies import LAW, Row, batches_and_settings


def figures_of(rows: list[Row], config: dict[str, Any]) -> dict[str, Any]:
    try:
        return outcome_of([from_rows(rows)], parse_config(config)).figures
    except InvalidArgumentError:
        # What cannot be aligned makes no batch.
        assume(False)
        raise


@LAW
@given(
    batches_and_settings(loss_reduction="none", max_staleness=1),
    st.sampled_from(["none", "batch", "mini_batch"]),
    st.sampled_from(["left_padded", "packed", "prefix_tree"]),
    st.sampled_from(["count", "mask"]),
    st.sampled_from([None, "mask"]),
    st.sampled_from(["grpo", "reinforce++", "opo"]),
    st.sampled_from([1, 4]),
)
def test_an_outcome_is_what_the_plan_and_the_shards_have(
    drawn: tuple[list[Row], dict[str, Any]],
    whiten: str,
    layout: str,
    stale: str,
    zero: str | None,
    estimator: str,
    multiple: int,
) -> None:
    rows, config = drawn
    config |= {"whiten": whiten, "layout": layout, "stale": stale, "zero_variance_filter": zero}
    config |= {"advantage_estimator": estimator}
    if layout != "left_padded":
        config |= {"pad_rows_to_multiple_of": multiple}
    figures = figures_of(rows, config)
    batch = build_batch(from_rows(rows), parse_config(config), run="r", batch=0)
    metrics, policy = batch.plan.metrics, [part for part in batch.plan.mini_batches if part.model == "policy"]
    assert figures["steps"] == batch.plan.optimizer_steps
    assert figures["rows"] == sum(part.rows for part in policy)
    assert figures["loss_tokens"] == sum(part.loss_tokens for part in policy)
    assert figures["padding_rows"] == metrics["padding_rows"]
    assert figures["tokens"] - metrics["padding_tokens"] == metrics.get("distinct_tokens", metrics["tokens"])
    assert figures["padding_share"] == pytest.approx(metrics["padding_share"])
    assert figures["breaks"] == {cause: count for cause, count in batch.stats().mismatches.items() if count}
    assert figures["barrier_ratio"] == pytest.approx(metrics["barrier_ratio"])
    if layout == "prefix_tree":
        return
    advantages: list[float] = []
    zero_groups: dict[str, bool] = {}
    for shard in batch.shards:
        if shard.address.model == "policy":
            _, metadata = naive.read_shard(shard)
            for row, uid in zip(naive.shard_rows(shard), metadata["uids"], strict=True):
                if not row["is_padding"]:
                    trained = row["advantages"][row["loss_mask"] == 1]
                    advantages += trained.tolist()
                    zero_groups[uid] = zero_groups.get(uid, True) and not trained.any()
    assert figures["groups"] == len(zero_groups)
    assert figures["zero_share"] == pytest.approx(np.mean(list(zero_groups.values())))
    assert figures["advantage_mean"] == pytest.approx(np.mean(advantages or [0]), abs=1e-5)
    assert figures["advantage_std"] == pytest.approx(np.std(advantages or [0]), rel=1e-4, abs=1e-3)
    assert figures["advantage_largest"] == pytest.approx(np.abs([0, *advantages]).max(), rel=1e-5)


def test_batches_are_summed() -> None:
    """Two batches with advantages of 2 and -4 in one token each, of two groups with and without an advantage."""
    config = parse_config(make_config(advantage_estimator="none", train_batch_size=2, layout="packed"))

    def batch(*advantages: float) -> Steps:
        return from_rows([make_row(f"p{number}", advantage=value) for number, value in enumerate(advantages)])

    one, other = batch(2, 0), batch(-4, 0)
    both = outcome_of([one, other], config)
    assert both == outcome_of([one], config).joined(outcome_of([other], config))
    assert (both.steps, both.groups, both.rows, both.zero_groups, both.advantages) == (4, 4, 4, 2, -2.0)
    assert both.largest == 4


def test_running_baselines_go_from_batch_to_batch() -> None:
    config = parse_config(make_config(advantage_estimator="rae"))
    batches = [from_rows([make_row(agent="a", reward=1.0)])] * 2
    first, both = (outcome_of(some, config).advantages for some in (batches[:1], batches))
    assert 0 < both - first < first


def test_a_break_is_shown_with_the_tokens_around_it() -> None:
    def step(number: int, prompt: list[int]) -> Row:
        return make_row(step=number, prompt=prompt, response=[8, 9], last=number == 2)

    steps = from_rows([step(0, [1, 2]), step(1, [1, 2, 8, 5, 6]), step(2, [1, 2])], step_wise=True)
    config = parse_config(make_config(merge="prefix"))
    assert outcome_of([steps], config).breaks == {"response": 1, "truncated": 1}
    one, other = first_breaks(steps, config, 9)
    assert one[1:] == (1, 0, [1, 2, 8], [9], [5, 6], "")
    assert other[1:] == (2, 1, [1, 2], [8, 5, 6, 8, 9], [], "")
    assert first_breaks(steps, config, 1) == [one]
