"""What holds of every plan, whatever the batch and its configuration."""

from __future__ import annotations

from itertools import pairwise
from math import lcm

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.errors import InvalidArgumentError
from gristmill_service.config import Flops, MicroBatch
from gristmill_service.pipeline.scheduling.plan import PADDING, MiniBatchPlan
from gristmill_service.pipeline.scheduling.schedule import schedule
from tests.plans import (
    Batch,
    Groups,
    aligned_in_rows,
    all_micro_batches,
    micro_batches,
    naive_aligned,
    naive_by_tokens,
    naive_filled,
    naive_kept,
    of,
    planned,
    real_rows,
    settings_of,
    shards,
)

GROUPS = st.lists(st.lists(st.integers(2, 30), min_size=1, max_size=6), min_size=1, max_size=12)
DP_SIZES = st.integers(1, 5) | st.integers(1, 64)
BY_SIZE = st.builds(lambda size: {"size": size}, st.integers(1, 5))
BY_TOKENS = st.builds(lambda tokens: {"max_tokens": tokens}, st.integers(1, 50))
BY_COUNT = st.builds(lambda count: {"count": count}, st.integers(1, 6))
PADDED = st.just("pad")
DROPPING = st.just("drop_trailing")
STRICT = st.just("error")


@st.composite
def batches(
    draw: st.DrawFn,
    micro_batch: st.SearchStrategy[dict[str, int]] = BY_SIZE | BY_TOKENS,
    on_misaligned: st.SearchStrategy[str] = PADDED,
    groups: st.SearchStrategy[Groups] = GROUPS,
) -> Batch:
    mode = draw(on_misaligned)
    critic = None if mode == "drop_trailing" else draw(st.none() | st.integers(1, 6))
    group_size, spec = draw(st.integers(1, 4)), draw(micro_batch)
    return Batch(
        draw(groups),
        settings_of(
            policy_mini_batch_size=draw(st.integers(1, 6)),
            critic_mini_batch_size=critic,
            micro_batch={"count": spec["count"] * group_size} if "count" in spec else spec,
            on_misaligned=mode,
            dp_size=draw(DP_SIZES),
            cp_size=draw(st.integers(1, 2)),
            vpp_size=draw(st.integers(1, 2)),
            microbatch_group_size=group_size,
        ),
    )


@st.composite
def row_batches(draw: st.DrawFn) -> Batch:
    """Batches whose mini-batches are a number of rows."""
    dp_size = draw(st.integers(1, 4) | st.integers(1, 16))
    critic = draw(st.none() | st.integers(1, 5))
    config = settings_of(
        mini_batch_unit="sequence",
        policy_mini_batch_size=dp_size * draw(st.integers(1, 5)),
        critic_mini_batch_size=None if critic is None else dp_size * critic,
        micro_batch=draw(BY_SIZE),
        dp_size=dp_size,
        vpp_size=draw(st.integers(1, 2)),
        microbatch_group_size=draw(st.integers(1, 3)),
    )
    return Batch(draw(GROUPS), config)


ANY_BATCH = batches() | batches(micro_batch=BY_COUNT) | row_batches()


def planned_or_refused(batch: Batch) -> list[MiniBatchPlan] | None:
    try:
        return planned(batch.groups, batch.config)
    except InvalidArgumentError:
        return None


@given(ANY_BATCH)
def test_every_row_trains_exactly_once_with_each_model(batch: Batch) -> None:
    plans = planned(batch.groups, batch.config)
    for model in batch.config.models:
        rows = [row for plan in of(model, plans) for row in real_rows(plan)]
        assert rows == list(range(len(batch.lengths)))


@given(batches(on_misaligned=DROPPING))
def test_a_kept_row_trains_exactly_once_and_a_dropped_one_never(batch: Batch) -> None:
    for plan in planned_or_refused(batch) or []:
        assert real_rows(plan) == list(range(plan.start, plan.kept_end))
        assert [*plan.groups, *plan.dropped_groups] == list(range(plan.groups.start, plan.dropped_groups.stop))
        edges = plan.groups.start, plan.groups.stop, plan.dropped_groups.stop
        assert tuple(batch.bounds[group] for group in edges) == (plan.start, plan.kept_end, plan.end)


@given(ANY_BATCH | batches(on_misaligned=DROPPING | STRICT))
def test_every_rank_has_as_many_micro_batches_and_all_together_a_multiple_of_align_to(batch: Batch) -> None:
    for plan in planned_or_refused(batch) or []:
        counts = {len(rank.micro_batches) for rank in plan.ranks}
        assert len(plan.ranks) == batch.config.dp_size
        assert counts == {plan.micro_batches_per_rank}
        assert plan.micro_batches_per_rank * batch.config.dp_size % batch.config.align_to == 0


@given(ANY_BATCH | batches(on_misaligned=DROPPING | STRICT))
def test_no_micro_batch_is_empty(batch: Batch) -> None:
    for plan in planned_or_refused(batch) or []:
        for rank in plan.ranks:
            assert rank.bounds[0] == 0
            assert rank.bounds[-1] == len(rank.rows)
        assert all(all_micro_batches(plan))


@given(batches(micro_batch=BY_SIZE) | row_batches() | batches(micro_batch=BY_SIZE, on_misaligned=DROPPING))
def test_counted_in_rows_the_ranks_get_equal_contiguous_chunks_cut_into_micro_batches(batch: Batch) -> None:
    size = batch.config.micro_batch.size
    assert size is not None
    for plan in planned_or_refused(batch) or []:
        rows = [row for shard in shards(plan) for row in shard]
        assert len({len(shard) for shard in shards(plan)}) == 1
        assert rows == list(range(plan.start, plan.kept_end)) + [PADDING] * plan.padding_rows
        for rank in micro_batches(plan):
            assert all(len(micro) == size for micro in rank[:-1])
            assert 1 <= len(rank[-1]) <= size


@given(batches(micro_batch=BY_SIZE))
def test_counted_in_rows_there_are_as_few_padding_rows_as_can_be(batch: Batch) -> None:
    dp_size, size = batch.config.dp_size, batch.config.micro_batch.size
    assert size is not None
    for plan in planned(batch.groups, batch.config):
        fewer = range(plan.rows, plan.rows + plan.padding_rows)
        assert not any(aligned_in_rows(rows, batch.config) for rows in fewer if rows % dp_size == 0)


@given(
    batches(micro_batch=BY_SIZE, on_misaligned=PADDED | DROPPING | STRICT), st.sampled_from(["none", "tokens", "flops"])
)
def test_filling_micro_batches_only_puts_padding_rows_behind_each_ranks_last(batch: Batch, balance: str) -> None:
    size = batch.config.micro_batch.size
    assert size is not None
    plain = batch.config.model_copy(update={"balance": balance, "flops": Flops(linear=1.0, quadratic=0.1)})
    filled = plain.model_copy(update={"micro_batch": MicroBatch(size=size, full=True)})
    as_they_come = planned_or_refused(Batch(batch.groups, plain))
    plans = planned_or_refused(Batch(batch.groups, filled))
    assert (plans is None) == (as_they_come is None)
    for plan, short in zip(plans or [], as_they_come or [], strict=True):
        assert micro_batches(plan) == naive_filled(micro_batches(short), size)
        assert {len(rows) for rows in all_micro_batches(plan)} == {size}
        assert plan.rows == short.rows


@given(batches(micro_batch=BY_COUNT))
def test_with_a_count_every_rank_has_that_many_micro_batches_of_contiguous_rows_as_even_as_can_be(batch: Batch) -> None:
    count = batch.config.micro_batch.count
    assert count is not None
    for plan in planned(batch.groups, batch.config):
        assert [len(rank) for rank in micro_batches(plan)] == [count] * batch.config.dp_size
        assert [row for shard in shards(plan) for row in shard if row != PADDING] == list(range(plan.start, plan.end))
        real = [sum(row != PADDING for row in shard) for shard in shards(plan)]
        sizes = [sum(row != PADDING for row in rows) for rows in all_micro_batches(plan)]
        assert max(real) - min(real) <= 1
        assert max(sizes) - min(sizes) <= 1


@given(batches(micro_batch=BY_COUNT))
def test_with_a_count_padding_rows_fill_up_only_what_would_be_empty(batch: Batch) -> None:
    for plan in planned(batch.groups, batch.config):
        bins = plan.micro_batches_per_rank * batch.config.dp_size
        assert plan.padding_rows == max(0, bins - plan.rows)
        assert all(rows == [PADDING] or PADDING not in rows for rows in all_micro_batches(plan))


@given(batches(micro_batch=BY_TOKENS, on_misaligned=PADDED | DROPPING | STRICT))
def test_a_token_cap_is_strict(batch: Batch) -> None:
    cap = batch.config.token_cap
    assert cap is not None
    for plan in planned_or_refused(batch) or []:
        for rows in all_micro_batches(plan):
            if len(rows) > 1:
                assert PADDING not in rows
                assert sum(batch.lengths[row] for row in rows) <= cap


@given(batches(micro_batch=BY_TOKENS))
def test_counted_in_tokens_padding_comes_after_all_splits_one_row_a_micro_batch(batch: Batch) -> None:
    for plan in planned(batch.groups, batch.config):
        dp_size = batch.config.dp_size
        dealt = [micro_batches(plan)[j % dp_size][j // dp_size] for j in range(plan.micro_batches_per_rank * dp_size)]
        if plan.padding_rows:
            real = dealt[: -plan.padding_rows]
            assert all(len(rows) == 1 for rows in real)
            assert PADDING not in {row for rows in real for row in rows}
            assert dealt[-plan.padding_rows :] == [[PADDING]] * plan.padding_rows
            assert plan.padding_rows < batch.config.align_to


@given(batches(micro_batch=BY_TOKENS, on_misaligned=PADDED | DROPPING | STRICT))
@settings(max_examples=300)
def test_counted_in_tokens_the_plan_equals_the_rules_carried_out_one_by_one(batch: Batch) -> None:
    plans = planned_or_refused(batch)
    expected = [
        naive_by_tokens(batch, range(first, min(first + size, len(batch.groups))))
        for size in map(batch.config.mini_batch_size, batch.config.models)
        for first in range(0, len(batch.groups), size)
    ]
    if plans is None:
        assert None in expected
    else:
        assert [micro_batches(plan) for plan in plans] == expected


@given(GROUPS, GROUPS, st.integers(1, 6), DP_SIZES, BY_SIZE | BY_TOKENS)
def test_the_number_of_optimizer_steps_does_not_depend_on_turn_counts(
    one: Groups, other: Groups, size: int, dp_size: int, micro_batch: dict[str, int]
) -> None:
    config = settings_of(policy_mini_batch_size=size, dp_size=dp_size, micro_batch=micro_batch)
    prompts = min(len(one), len(other))
    plans, others = planned(one[:prompts], config), planned(other[:prompts], config)
    assert len(plans) == -(-prompts // size)
    assert [plan.groups for plan in plans] == [plan.groups for plan in others]


@given(batches(groups=st.lists(st.lists(st.integers(2, 30), min_size=1, max_size=3), min_size=1, max_size=3)))
def test_any_dp_size_serves_any_number_of_rows_from_one(batch: Batch) -> None:
    for plan in planned(batch.groups, batch.config):
        assert plan.rows > 0
        assert all(len(rank.rows) for rank in plan.ranks)


@given(batches() | batches(on_misaligned=DROPPING))
def test_a_prompt_group_is_never_split(batch: Batch) -> None:
    for plan in planned_or_refused(batch) or []:
        assert {plan.start, plan.kept_end, plan.end} <= set(batch.bounds)


@given(batches())
def test_a_mini_batch_has_exactly_its_number_of_groups_and_only_the_last_may_have_fewer(batch: Batch) -> None:
    plans = planned(batch.groups, batch.config)
    for model in batch.config.models:
        size = batch.config.mini_batch_size(model)
        mine = of(model, plans)
        assert [plan.index for plan in mine] == list(range(len(mine)))
        assert [group for plan in mine for group in plan.groups] == list(range(len(batch.groups)))
        assert all(len(plan.groups) == size for plan in mine[:-1])
        assert 1 <= len(mine[-1].groups) <= size


@given(batches())
def test_the_policy_is_planned_as_if_there_were_no_critic_and_comes_first(batch: Batch) -> None:
    plans = planned(batch.groups, batch.config)
    alone = planned(batch.groups, batch.config.model_copy(update={"critic_mini_batch_size": None}))
    assert list(map(repr, plans[: len(alone)])) == list(map(repr, alone))
    assert {plan.model for plan in plans[len(alone) :]} <= {"critic"}


@given(ANY_BATCH | batches(on_misaligned=DROPPING | STRICT))
def test_the_same_batch_gives_the_same_plan_and_is_not_modified(batch: Batch) -> None:
    lengths, bounds = np.array(batch.lengths), np.array(batch.bounds)
    for array in (lengths, bounds):
        array.flags.writeable = False
    if (plans := planned_or_refused(batch)) is not None:
        assert repr(schedule(lengths, bounds, batch.config)) == repr(plans)


@given(batches(on_misaligned=DROPPING))
@settings(max_examples=300)
def test_dropping_keeps_the_most_whole_leading_groups_that_can_align(batch: Batch) -> None:
    size = batch.config.policy_mini_batch_size
    kept = [
        naive_kept(batch, range(first, min(first + size, len(batch.groups))))
        for first in range(0, len(batch.groups), size)
    ]
    plans = planned_or_refused(batch)
    if plans is None:
        assert None in kept
    else:
        assert [len(plan.groups) for plan in plans] == kept


@given(batches(on_misaligned=STRICT))
def test_error_refuses_exactly_the_batches_that_cannot_be_aligned_whole(batch: Batch) -> None:
    whole = [
        naive_aligned(range(batch.bounds[first], batch.bounds[min(first + size, len(batch.groups))]), batch)
        for size in map(batch.config.mini_batch_size, batch.config.models)
        for first in range(0, len(batch.groups), size)
    ]
    assert (planned_or_refused(batch) is not None) == all(whole)


@given(batches(on_misaligned=DROPPING | STRICT))
def test_what_need_not_be_dropped_or_refused_is_planned_as_under_pad(batch: Batch) -> None:
    plans = planned_or_refused(batch)
    if plans is not None and not any(plan.dropped_groups for plan in plans):
        padded = planned(batch.groups, batch.config.model_copy(update={"on_misaligned": "pad"}))
        assert repr(plans) == repr(padded)


@given(batches(micro_batch=BY_SIZE, on_misaligned=DROPPING | STRICT))
def test_counted_in_rows_nothing_is_dropped_or_refused_without_virtual_stages(batch: Batch) -> None:
    config = batch.config.model_copy(update={"vpp_size": 1})
    assert not any(plan.dropped_groups for plan in planned(batch.groups, config))


@given(row_batches())
def test_in_rows_every_mini_batch_has_its_size_and_padding_is_dealt_evenly(batch: Batch) -> None:
    config, rows = batch.config, len(batch.lengths)
    plans = planned(batch.groups, config)
    multiple = lcm(*map(config.mini_batch_size, config.models))
    for model in config.models:
        mine, size = of(model, plans), config.mini_batch_size(model)
        assert len(mine) == -(-rows // multiple) * multiple // size
        totals = {plan.rows + plan.padding_rows for plan in mine}
        assert totals == {size} if config.vpp_size == 1 else len(totals) == 1 and min(totals) >= size
        padding = [plan.padding_rows for plan in mine]
        assert padding == sorted(padding)
        assert padding[-1] - padding[0] <= 1
        assert rows < len(mine) or all(plan.rows for plan in mine)
        assert all(before.end == after.start for before, after in pairwise(mine))


@given(row_batches())
def test_in_rows_the_groups_of_a_mini_batch_are_those_with_a_row_in_it(batch: Batch) -> None:
    spans = list(enumerate(pairwise(batch.bounds)))
    for plan in planned(batch.groups, batch.config):
        assert list(plan.groups) == [group for group, (a, b) in spans if a < plan.kept_end and plan.start < b]
        assert plan.kept_end == plan.end
        assert not plan.dropped_groups
