"""The table of a batch has every number of it: its sums are the plan's metrics, its rows and ranks the shards'."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gristmill._wire.batch_table import BatchTable
from gristmill._wire.columns import Ragged
from gristmill._wire.rows import from_rows
from gristmill._wire.steps import Steps
from gristmill_service.config import RunConfig, parse_config
from gristmill_service.pipeline import BuiltBatch, build_batch
from gristmill_service.pipeline.layout.batch_shards import layouts_of
from gristmill_service.pipeline.layout.iovec import join
from gristmill_service.pipeline.numbers import numbers_of
from gristmill_service.pipeline.plan_document import PlanDocument, encode_plan, plan_document
from gristmill_service.pipeline.planning import Plan, make_plan
from gristmill_service.pipeline.rows.validate import Received
from gristmill_service.pipeline.scheduling.schedule import MisalignedError
from gristmill_service.pipeline.table import table_of
from tests.reference_model.drawing import drawn
from tests.reference_model.rows import batches_of
from tests.reference_model.table import check_table
from tests.rows import make_config, make_row

BATCHES = 60


def built(rows: list[Any], **config: Any) -> BuiltBatch:
    return build_batch(from_rows(rows), parse_config(make_config(**config)), run="r", batch=0)


def made(steps: Steps, config: RunConfig) -> BuiltBatch | None:
    try:
        return build_batch(steps, config, run="r", batch=0)
    except MisalignedError:
        return None


@pytest.mark.parametrize("seed", range(BATCHES))
def test_its_sums_are_the_plans_metrics_and_its_rows_and_ranks_the_shards(seed: int) -> None:
    rows, settings = drawn(f"table/{seed}")
    config = parse_config(settings)
    for some in batches_of(rows, settings):
        if (batch := made(from_rows(some, step_wise=config.step_wise, columns=config.columns), config)) is not None:
            shards: dict[tuple[str, int, int], bytes] = {
                (one.address.model, one.address.mini_batch, one.address.rank): join(one.iovec()) for one in batch.shards
            }
            table = BatchTable.decode(batch.table.encode()).by_row()
            check_table(table, json.loads(encode_plan(batch.plan)), shards, is_scaled=config.loss_reduction != "none")


def test_an_advantage_is_the_mean_over_trained_tokens_where_mini_batches_whiten_a_trajectory_differently() -> None:
    """Rows without a trained token do not count."""
    lasts = (3, 1, 1, 1)
    rows = [
        make_row("p", sample, step, last=step == last, prompt=[step], reward=float(sample**2))
        | {"loss_mask": [int(last == 1 or step == last)]}
        for sample, last in enumerate(lasts)
        for step in range(last + 1)
    ]
    config = {"n_samples_per_prompt": 4, "mini_batch_unit": "sequence", "policy_mini_batch_size": 3}
    batch = built(rows, **config, whiten="mini_batch", merge="none", loss_reduction="none")
    shards = {("policy", one.address.mini_batch, 0): join(one.iovec()) for one in batch.shards}
    table = batch.table.by_row()
    assert table["loss_tokens"].tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1, 1]
    check_table(table, json.loads(encode_plan(batch.plan)), shards, is_scaled=False)


def test_it_is_small() -> None:
    """A row has 56 bytes, 16 more for a critic, a trajectory 48, and a break 16; texts are stored once."""
    rows = [
        make_row(
            f"p{group}",
            sample,
            step=step,
            last=step == 2,
            prompt=[1] if step < 2 else [9],
            response=[2] * (step + 1),
            agent="solver",
            tag="math",
            stop_reason="length",
            cost=float(step),
        )
        for group in range(40)
        for sample in range(8)
        for step in range(3)
    ]
    flops = {"linear": 1.0, "quadratic": 0.0, "column": "cost"}
    columns = [{"name": "cost", "dtype": "float64", "scope": "row"}]
    settings = {"train_batch_size": 40, "policy_mini_batch_size": 20, "critic_mini_batch_size": 20}
    config = parse_config(
        make_config(**settings, n_samples_per_prompt=8, merge="prefix", balance="flops", flops=flops, columns=columns)
    )
    table = build_batch(from_rows(rows, columns=config.columns), config, run="r", batch=0).table
    sizes = {
        "row": sum(values.itemsize for name, values in table.rows.items() if not name.startswith("critic")),
        "critic": sum(values.itemsize for name, values in table.rows.items() if name.startswith("critic")),
        "trajectory": sum(values.itemsize for values in table.trajectories.values()),
        "break": sum(values.itemsize for values in table.breaks.values()),
    }
    assert {name: size <= most for (name, size), most in zip(sizes.items(), (56, 16, 48, 16), strict=True)} == {
        "row": True,
        "critic": True,
        "trajectory": True,
        "break": True,
    }, sizes
    assert len(table.breaks["step"]) == 40 * 8 * 2
    assert table.texts["tags"] == ["math"]
    assert len(table.texts["uids"]) == 40


class Untouchable:
    """Tokens that nothing may read."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} of tokens was read")


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo", "maxrl", "rae"])
@pytest.mark.parametrize("layout", ["left_padded", "packed"])
def test_a_plan_reads_no_tokens_but_those_that_its_settings_need(estimator: str, layout: str) -> None:
    rows = [make_row(f"p{group}", sample, reward=sample) for group in range(4) for sample in range(2)]
    config = parse_config(make_config(advantage_estimator=estimator, layout=layout, n_samples_per_prompt=2))
    numbers, received = numbers_of(from_rows(rows), config)
    steps = received.steps
    untouchable: dict[str, Any] = {name: Untouchable() for name in ("loss_mask", "logprobs", "extras", "token_rewards")}
    tokens = Ragged(np.full(1, 7, np.int32), steps.tokens.starts, steps.tokens.lengths)
    poisoned = replace(received, steps=replace(steps, tokens=tokens, **untouchable))
    plan, other = make_plan(numbers, received, config), make_plan(numbers, poisoned, config)
    assert encode_plan(document(plan, received, config)) == encode_plan(document(other, poisoned, config))


def document(plan: Plan, received: Received, config: RunConfig) -> PlanDocument:
    layouts = layouts_of(plan, config)
    return plan_document(plan, table_of(plan, received, layouts, config), layouts, config, 0, None)


def test_the_freshest_advantage_is_the_last_publications() -> None:
    """A batch that waits for columns has no advantages yet, and says so."""
    columns = [{"name": "ref_logprobs", "dtype": "float32", "scope": "response", "source": "trainer"}]
    rows = [make_row(sample=sample, rollout_logprobs=[-1.0, -1.0], response=[1, 2]) for sample in range(2)]
    kl = {"estimator": "k1", "coef": 0.1}
    batch = built(rows, n_samples_per_prompt=2, columns=columns, kl_in_reward=kl, kl_from="rollout_logprobs")
    assert batch.awaits == {"ref_logprobs"}
    assert np.isnan(batch.table.by_row()["advantage"]).all()
