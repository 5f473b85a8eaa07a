"""`balance: tokens | flops`: what it does not change, and how little ranks wait for each other."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gristmill._wire.rows import from_rows
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import parse_config
from gristmill_service.pipeline import build_batch
from gristmill_service.pipeline.scheduling.balance import barrier_ratio, loads_of
from gristmill_service.pipeline.scheduling.plan import PADDING, MiniBatchPlan
from gristmill_service.pipeline.scheduling.schedule import schedule
from tests.pipeline.test_schedule_laws import (
    ANY_BATCH,
    BY_SIZE,
    BY_TOKENS,
    DROPPING,
    PADDED,
    STRICT,
    batches,
    planned_or_refused,
    row_batches,
)
from tests.plans import Batch, all_micro_batches, micro_batches, of, planned, real_rows, settings_of, shards
from tests.rows import make_config, make_row

REFERENCE = json.loads((Path(__file__).parents[1] / "reference" / "balance.json").read_text())
CAP = REFERENCE["cap"]

BALANCES: st.SearchStrategy[dict[str, Any]] = st.just({"balance": "tokens"}) | st.builds(
    lambda linear, quadratic: {"balance": "flops", "flops": {"linear": linear, "quadratic": quadratic}},
    st.sampled_from([0.0, 1.0, 1.5e10]),
    st.sampled_from([1e-3, 1.0, 262_144.0]),
)


def changed(batch: Batch, **settings: Any) -> Batch:
    mapping = batch.config.model_dump(exclude_defaults=True)
    return Batch(batch.groups, settings_of(**{**mapping, **settings}))


def balanced(drawn: st.SearchStrategy[Batch]) -> st.SearchStrategy[Batch]:
    return st.builds(lambda batch, balance: changed(batch, **balance), drawn, BALANCES)


@st.composite
def crowded(draw: st.DrawFn) -> Batch:
    """Many rows to a micro-batch, a few of them far longer than the rest, and now and then hardly any room."""
    short, long = st.integers(1, 12), st.integers(1, 120)
    lengths = draw(st.lists(short, min_size=10, max_size=80)) + draw(st.lists(long, max_size=12))
    config = settings_of(
        policy_mini_batch_size=len(lengths),
        dp_size=draw(st.integers(1, 6)),
        micro_batch={"max_tokens": draw(st.integers(20, 130))},
        vpp_size=draw(st.integers(1, 2)),
        microbatch_group_size=draw(st.integers(1, 3)),
    )
    return Batch([[tokens] for tokens in draw(st.permutations(lengths))], config)


def balanced_by_tokens(lengths: list[int], dp_size: int, size: int) -> Batch:
    config = settings_of(
        policy_mini_batch_size=len(lengths), dp_size=dp_size, micro_batch={"size": size}, balance="tokens"
    )
    return Batch([[tokens] for tokens in lengths], config)


ANY = balanced(ANY_BATCH | batches(on_misaligned=DROPPING | STRICT) | crowded())
IN_TOKENS = balanced(crowded() | batches(micro_batch=BY_TOKENS, on_misaligned=PADDED | DROPPING | STRICT))
IN_ROWS = balanced(batches(micro_batch=BY_SIZE, on_misaligned=PADDED | DROPPING) | row_batches())


def loads_of_rows(batch: Batch) -> list[float]:
    """Per row, with what a padding row costs as the last, which is where -1 leads."""
    flops = batch.config.flops
    costs = [n if flops is None else flops.linear * n + flops.quadratic * n**2 for n in batch.lengths]
    return [*costs, 0]


def slowest(plan: MiniBatchPlan, batch: Batch) -> float:
    """Sum over micro-steps of the slowest rank's load."""
    cost = loads_of_rows(batch)
    loads: list[list[float]] = [[sum(cost[row] for row in rows) for rows in rank] for rank in micro_batches(plan)]
    steps: list[tuple[float, ...]] = list(zip(*loads, strict=True))
    return sum(max(step) for step in steps)


def waiting(plan: MiniBatchPlan, batch: Batch) -> float:
    """Barrier ratio of a plan with every row of the batch."""
    return slowest(plan, batch) * batch.config.dp_size / sum(loads_of_rows(batch))


# --- What balance does not change


@given(ANY)
def test_the_same_rows_are_kept_dropped_or_refused_as_without_balance(batch: Batch) -> None:
    plans, others = planned_or_refused(batch), planned_or_refused(changed(batch, balance="none"))
    assert (plans is None) == (others is None)
    for plan, other in zip(plans or [], others or [], strict=True):
        assert real_rows(plan) == real_rows(other) == list(range(plan.start, plan.kept_end))
        assert (plan.model, plan.index, plan.end) == (other.model, other.index, other.end)
        assert (plan.groups, plan.dropped_groups) == (other.groups, other.dropped_groups)


@given(ANY)
def test_there_are_as_many_micro_batches_and_padding_rows_as_without_balance(batch: Batch) -> None:
    plans, others = planned_or_refused(batch), planned_or_refused(changed(batch, balance="none"))
    for plan, other in zip(plans or [], others or [], strict=True):
        counts = {len(rank.micro_batches) for rank in plan.ranks}
        assert counts == {other.micro_batches_per_rank}
        assert len(plan.ranks) == batch.config.dp_size
        assert plan.padding_rows == other.padding_rows


@given(ANY)
def test_no_micro_batch_is_empty_and_its_rows_stand_in_row_order_with_padding_last(batch: Batch) -> None:
    for plan in planned_or_refused(batch) or []:
        for rank, rows in zip(plan.ranks, shards(plan), strict=True):
            assert (rank.bounds[0], rank.bounds[-1]) == (0, len(rows))
            assert PADDING not in rows[: sum(row != PADDING for row in rows)]
        for micro_batch in all_micro_batches(plan):
            real = [row for row in micro_batch if row != PADDING]
            assert micro_batch
            assert real == sorted(real)


@given(IN_TOKENS)
def test_a_token_cap_is_strict_and_a_longer_row_stands_alone(batch: Batch) -> None:
    cap = batch.config.token_cap
    assert cap is not None
    for plan in planned_or_refused(batch) or []:
        for rows in all_micro_batches(plan):
            if len(rows) > 1:
                assert PADDING not in rows
                assert sum(batch.lengths[row] for row in rows) <= cap


@given(IN_ROWS)
def test_counted_in_rows_every_rank_has_the_same_micro_batches_as_without_balance(batch: Batch) -> None:
    plans, others = planned_or_refused(batch), planned_or_refused(changed(batch, balance="none"))
    for plan, other in zip(plans or [], others or [], strict=True):
        for rank in plan.ranks:
            assert rank.bounds.tolist() == other.ranks[0].bounds.tolist()


@given(ANY)
def test_padding_is_dealt_evenly_to_the_ranks_unless_the_plan_without_balance_waits_less(batch: Batch) -> None:
    plans, others = planned_or_refused(batch), planned_or_refused(changed(batch, balance="none"))
    for plan, other in zip(plans or [], others or [], strict=True):
        padding = [rows.count(PADDING) for rows in shards(plan)]
        assert max(padding) - min(padding) <= 1 or shards(plan) == shards(other)


@pytest.mark.parametrize("layout", ["packed", "prefix_tree"])
def test_no_rank_has_padding_alone_where_each_can_have_a_row_and_none_waits_longer(layout: str) -> None:
    """Rows of 4, 9, 4 and 9 tokens for three ranks: contiguous chunks give the third rank two padding rows, and each
    way of dealing those evenly waits for 9 + 4 tokens, too."""
    rows = [
        make_row(uid=f"p{group}", prompt=[group], response=[7] * tokens) for group, tokens in enumerate([3, 8, 3, 8])
    ]
    sizes = {"train_batch_size": 4, "policy_mini_batch_size": 4, "dp_size": 3, "micro_batch": {"size": 1}}
    config = parse_config(make_config(**sizes, balance="tokens", layout=layout))
    (part,) = build_batch(from_rows(rows), config, run="r", batch=0).plan.mini_batches
    assert sorted(list(rank.rows).count(PADDING) for rank in part.ranks) == [0, 1, 1]
    steps = zip(*(rank.rows for rank in part.ranks), strict=True)
    lengths = [4, 9, 4, 9]
    assert sum(max(0 if row == PADDING else lengths[row] for row in step) for step in steps) == 13


@given(ANY)
def test_the_same_batch_gives_the_same_plan_and_is_not_modified(batch: Batch) -> None:
    lengths, bounds = np.array(batch.lengths), np.array(batch.bounds)
    for array in (lengths, bounds):
        array.flags.writeable = False
    if (plans := planned_or_refused(batch)) is not None:
        assert repr(schedule(lengths, bounds, batch.config)) == repr(plans)


@given(balanced(batches()))
def test_a_critics_mini_batches_are_balanced_by_themselves(batch: Batch) -> None:
    plans = planned(batch.groups, batch.config)
    alone = planned(batch.groups, batch.config.model_copy(update={"critic_mini_batch_size": None}))
    assert repr(of("policy", plans)) == repr(alone)
    if (size := batch.config.critic_mini_batch_size) is not None:
        other = batch.config.model_copy(update={"policy_mini_batch_size": size, "critic_mini_batch_size": None})
        assert list(map(shards, of("critic", plans))) == list(map(shards, planned(batch.groups, other)))


# --- How little ranks wait


@given(IN_TOKENS)
def test_ranks_never_wait_longer_than_with_first_fit_dealt_by_load(batch: Batch) -> None:
    plans, others = planned_or_refused(batch), planned_or_refused(changed(batch, balance="none"))
    cost = loads_of_rows(batch)
    for plan, other in zip(plans or [], others or [], strict=True):
        loads = sorted((sum(cost[row] for row in rows) for rows in all_micro_batches(other)), reverse=True)
        assert slowest(plan, batch) <= sum(loads[:: batch.config.dp_size]) * (1 + 1e-9)


SMALL = balanced(
    batches(micro_batch=BY_SIZE, on_misaligned=PADDED)
    | st.builds(
        lambda lengths, dp_size, size: Batch(
            [[tokens] for tokens in lengths],
            settings_of(policy_mini_batch_size=len(lengths), dp_size=dp_size, micro_batch={"size": size}),
        ),
        st.lists(st.integers(2, 50), min_size=6, max_size=16),
        st.integers(2, 3),
        st.integers(2, 4),
    )
)


@settings(max_examples=400)
@given(SMALL | ANY)
@example(balanced_by_tokens([14, 12, 8, 2, 18, 14, 5], dp_size=2, size=4))
@example(balanced_by_tokens([2, 2, 2, 3, 2, 3, 5], dp_size=2, size=2))
@example(balanced_by_tokens([24, 10, 12, 22, 12, 25, 25, 6], dp_size=2, size=4))
def test_ranks_never_wait_longer_than_without_balance(batch: Batch) -> None:
    plans, others = planned_or_refused(batch), planned_or_refused(changed(batch, balance="none"))
    for plan, other in zip(plans or [], others or [], strict=True):
        assert slowest(plan, batch) <= slowest(other, batch) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("name", "dp_size", "micro_batch", "reach"),
    [
        ("lengths", 8, {"max_tokens": CAP}, 1.008),
        ("lengths", 64, {"max_tokens": CAP}, 1.13),
        ("lengths_8192", 8, {"max_tokens": CAP}, 1.001),
        ("lengths_8192", 64, {"max_tokens": CAP}, 1.005),
        ("lengths", 8, {"size": 4}, 1.003),
        ("lengths", 64, {"size": 4}, 1.04),
        ("lengths", 64, {"size": 16}, 1.02),
        ("lengths_8192", 64, {"size": 8}, 1.004),
        ("lengths", 8, {"count": 16}, 1.004),
        ("lengths_8192", 64, {"count": 16}, 1.02),
    ],
)
def test_on_the_reference_lengths_ranks_hardly_wait(
    name: str, dp_size: int, micro_batch: dict[str, int], reach: float
) -> None:
    groups = [[tokens] for tokens in REFERENCE[name]]
    config = settings_of(
        policy_mini_batch_size=len(groups),
        dp_size=dp_size,
        micro_batch=micro_batch,
        balance="flops",
        flops=REFERENCE["flops"],
    )
    batch = Batch(groups, config)
    (plan,) = planned(groups, config)
    (plain,) = planned(groups, config.model_copy(update={"balance": "none"}))
    assert waiting(plan, batch) < reach < waiting(plain, batch)
    assert plan.micro_batches_per_rank == plain.micro_batches_per_rank
    assert barrier_ratio([plan], loads_of(np.array(batch.lengths), config.flops)) == pytest.approx(waiting(plan, batch))


@pytest.mark.parametrize("micro_batch", [{"max_tokens": CAP}, {"size": 4}])
@pytest.mark.parametrize("dp_size", [8, 64])
def test_over_the_whole_mini_batch_ranks_agree_more_closely_than_step_by_step(
    dp_size: int, micro_batch: dict[str, int]
) -> None:
    batch = Batch(
        [[tokens] for tokens in REFERENCE["lengths_8192"]],
        settings_of(policy_mini_batch_size=8192, dp_size=dp_size, micro_batch=micro_batch, balance="tokens"),
    )
    (plan,) = planned(batch.groups, batch.config)
    lengths = batch.lengths
    totals = [sum(lengths[row] for row in rows) for rows in shards(plan)]
    assert max(totals) / np.mean(totals) < 1.0005


def full_caps(random: np.random.Generator, micro_batches: int) -> list[int]:
    """Rows that first-fit packs into that many micro-batches, each full to 99.9%, and hardly anything else does."""
    cuts = np.sort(random.integers(1, CAP - 33, (micro_batches, 5)), axis=1)
    edges = np.hstack([np.zeros((micro_batches, 1), int), cuts, np.full((micro_batches, 1), CAP - 33)])
    return [int(tokens) for tokens in np.diff(edges).ravel() if tokens]


@pytest.mark.parametrize("seed", range(3))
def test_where_the_cap_leaves_no_room_the_micro_batches_of_first_fit_are_dealt_by_load(seed: int) -> None:
    lengths = full_caps(np.random.default_rng(seed), 128)
    config = settings_of(
        policy_mini_batch_size=len(lengths),
        dp_size=64,
        micro_batch={"max_tokens": CAP},
        balance="flops",
        flops=REFERENCE["flops"],
    )
    batch = Batch([[tokens] for tokens in lengths], config)
    (plan,) = planned(batch.groups, config)
    (plain,) = planned(batch.groups, config.model_copy(update={"balance": "none"}))
    assert sorted(map(sorted, all_micro_batches(plan))) == sorted(map(sorted, all_micro_batches(plain)))
    assert waiting(plan, batch) < waiting(plain, batch)


def test_the_step_of_the_longest_row_is_filled_up_to_its_weight() -> None:
    config = settings_of(policy_mini_batch_size=9, dp_size=2, micro_batch={"max_tokens": 20}, balance="tokens")
    (plan,) = planned([[20], [6], [5], [4], [3], [2], [2], [1], [1]], config)
    assert slowest(plan, Batch([[20, 6, 5, 4, 3, 2, 2, 1, 1]], config)) == 20 + 2  # the 44 tokens, without waiting
    assert [0] in all_micro_batches(plan)


# --- Alignment


# --- Weights


@given(balanced(batches()), st.integers(-30, 30))
def test_only_the_ratio_of_linear_to_quadratic_counts(batch: Batch, exponent: int) -> None:
    if (flops := batch.config.flops) is None:
        return
    scaled = {"linear": flops.linear * 2.0**exponent, "quadratic": flops.quadratic * 2.0**exponent}
    assert repr(planned(batch.groups, batch.config)) == repr(planned(batch.groups, changed(batch, flops=scaled).config))


@given(batches())
def test_flops_without_a_quadratic_part_are_tokens(batch: Batch) -> None:
    flops = changed(batch, balance="flops", flops={"linear": 3.0})
    assert repr(planned(batch.groups, flops.config)) == repr(
        planned(batch.groups, changed(batch, balance="tokens").config)
    )


def test_coefficients_of_any_size_do_not_overflow() -> None:
    flops = {"linear": 1e308, "quadratic": 1e308}
    config = settings_of(policy_mini_batch_size=4, dp_size=2, micro_batch={"size": 2}, balance="flops", flops=flops)
    (plan,) = planned([[300_000], [9], [7], [299_999]], config)
    assert sorted(all_micro_batches(plan)) == [[0, 2], [1, 3]]


# --- As a person runs it


def test_the_plan_command_balances_a_lengths_file_and_prints_the_barrier_ratio(tmp_path: Path) -> None:
    lengths = REFERENCE["lengths"]
    rows = [
        {"uid": f"p{number // 8}", "sample": number % 8, "prompt_len": 1, "response_len": tokens - 1, "reward": 0.0}
        for number, tokens in enumerate(lengths)
    ]
    (tmp_path / "lengths.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "train_batch_size": 128,
        "n_samples_per_prompt": 8,
        "policy_mini_batch_size": 128,
        "dp_size": 8,
        "micro_batch": {"max_tokens": CAP},
        "balance": "flops",
        "flops": REFERENCE["flops"],
    }
    (tmp_path / "run.json").write_text(json.dumps(settings))
    command = [str(Path(sys.executable).with_name("gristmill")), "plan", "lengths.jsonl", "--config", "run.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    (mini_batch,) = plan["mini_batches"]
    cost = [REFERENCE["flops"]["linear"] * n + REFERENCE["flops"]["quadratic"] * n**2 for n in lengths]
    loads = np.array(
        [
            [sum(cost[rank["rows"][at]] for at in micro_batch) for micro_batch in rank["micro_batches"]]
            for rank in mini_batch["ranks"]
        ]
    )
    assert mini_batch["micro_batches_per_rank"] == 18
    assert sorted(row for rank in mini_batch["ranks"] for row in rank["rows"]) == list(range(1024))
    assert plan["metrics"]["barrier_ratio"] == pytest.approx(loads.max(axis=0).sum() * 8 / loads.sum())
    assert plan["metrics"]["barrier_ratio"] < 1.008


@pytest.mark.parametrize("micro_batch", [{"max_tokens": CAP}, {"size": 4}])
def test_a_hundred_thousand_rows_are_balanced_at_once(micro_batch: dict[str, int]) -> None:
    lengths = np.random.default_rng(0).integers(1, CAP, 100_000)
    config = settings_of(
        policy_mini_batch_size=12_500, dp_size=64, micro_batch=micro_batch, balance="flops", flops=REFERENCE["flops"]
    )
    start = time.process_time()
    schedule(lengths, np.arange(0, 100_001, 8), config)
    assert time.process_time() - start < 2  # 0.25 s


def test_a_column_adds_to_the_cost_of_rows() -> None:
    patches = [0, 900, 0, 300, 300, 300, 0, 0]
    rows = [
        make_row(uid=f"p{index}", prompt=[7] * (40 + index), response=[8] * 10) | {"patches": count}
        for index, count in enumerate(patches)
    ]
    config = make_config(train_batch_size=8, policy_mini_batch_size=8, dp_size=2, step_wise=False)
    config |= {"columns": [{"name": "patches", "dtype": "int32", "scope": "row"}], "balance": "flops"}
    for limit in ({"size": 4}, {"max_tokens": 500}, {"count": 1}):
        ratios = {}
        for name in (None, "patches"):
            checked = parse_config(config | {"micro_batch": limit, "flops": {"linear": 1.0, "column": name}})
            (part,) = build_batch(
                from_rows(rows, step_wise=False, columns=checked.columns), checked, run="r", batch=0
            ).plan.mini_batches
            loads = [sum(50 + row + patches[row] for row in rank.rows if row >= 0) for rank in part.ranks]
            ratios[name] = max(loads) * 2 / sum(loads)
        assert ratios["patches"] < 1.03 < ratios[None]


def test_a_negative_cost_is_refused() -> None:
    config = make_config(dp_size=1, step_wise=False, flops={"column": "patches"})
    checked = parse_config(config | {"columns": [{"name": "patches", "dtype": "int32", "scope": "row"}]})
    steps = from_rows([make_row() | {"patches": -1}], step_wise=False, columns=checked.columns)
    with pytest.raises(InvalidArgumentError, match="patches is -1, and flops adds it to the row's cost; send 0"):
        build_batch(steps, checked, run="r", batch=0)
