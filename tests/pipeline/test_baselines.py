"""`rae`: scores less running baselines of their tag and agent."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill._wire.rows import from_rows
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import parse_config
from gristmill_service.pipeline import build_batch
from gristmill_service.pipeline.credit.baselines import BaselineKey
from gristmill_service.pipeline.plan_document import baselines_after, decode_plan, encode_plan
from tests.pipeline.credit import advantages_of
from tests.pipeline.plans import planned
from tests.rows import make_config, make_row
from tests.strategies import LAW, Row

HALF: dict[str, Any] = {"advantage_estimator": "rae", "rae": {"decay": 0.5}, "n_samples_per_prompt": 4}


def rows_of(scores: list[tuple[str, float]], uid: str = "p", **more: Any) -> list[Row]:
    return [make_row(uid=uid, sample=at, reward=score, agent=agent) | more for at, (agent, score) in enumerate(scores)]


def estimated(
    rows: list[Row], before: dict[BaselineKey, float], **settings: Any
) -> tuple[list[float], dict[Any, float]]:
    config = parse_config(make_config() | HALF | settings)
    credit = planned(from_rows(rows), config, None, baselines=before).credit
    assert credit is not None
    return credit.advantages.tolist(), dict(credit.baselines)


def test_each_score_is_compared_with_the_baseline_before_it_and_then_moves_it() -> None:
    advantages, after = estimated(rows_of([("a", 1.0), ("b", 4.0), ("a", 1.0), ("a", 0.0)]), {})
    assert advantages == [1.0, 4.0, 0.5, -0.75]
    assert after == {BaselineKey("", "a"): 0.375, BaselineKey("", "b"): 2.0}


def test_tags_have_baselines_of_their_own_and_baselines_of_others_stay() -> None:
    before = {BaselineKey("math", "a"): 1.0, BaselineKey("code", "a"): 3.0}
    advantages, after = estimated(rows_of([("a", 2.0)], tag="math"), before)
    assert advantages == [1.0]
    assert after == {BaselineKey("math", "a"): 1.5, BaselineKey("code", "a"): 3.0}
    assert before[BaselineKey("math", "a")] == 1.0


def test_a_lone_sample_is_compared_with_the_baseline_too() -> None:
    assert estimated(rows_of([("", 2.0)]), {}, n_samples_per_prompt=1)[0] == [2.0]
    assert estimated(rows_of([("", 2.0)]), {}, n_samples_per_prompt=4)[0] == [2.0]


def test_a_length_penalty_and_a_kl_change_what_is_compared() -> None:
    column = {"name": "kl", "dtype": "float32", "scope": "row", "merge": "sum"}
    settings = {"columns": [column], "kl_in_reward": {"coef": 0.5, "column": "kl"}}
    config = parse_config(make_config() | HALF | settings)
    steps = from_rows([row | {"kl": 1.0} for row in rows_of([("a", 2.0)])], columns=config.columns)
    credit = planned(steps, config, None).credit
    assert credit is not None
    assert credit.advantages.tolist() == [1.5]
    assert estimated(rows_of([("a", 2.0)]), {}, length_penalty={"turns": 0.5})[0] == [1.0]


def test_the_plan_has_the_baselines_before_and_after() -> None:
    config = parse_config(make_config() | HALF)
    plan = build_batch(
        from_rows(rows_of([("a", 1.0)])), config, run="r", batch=0, baselines={BaselineKey("", "a"): 2.0}
    ).plan
    [baseline] = decode_plan(encode_plan(plan)).baselines or []
    assert (baseline.tag, baseline.agent, baseline.before, baseline.after) == ("", "a", 2.0, 1.5)
    assert baselines_after(plan) == {BaselineKey("", "a"): 1.5}


@pytest.mark.parametrize("name", ["ref_logprobs", "old_logprobs"])
def test_a_kl_that_trainers_write_is_refused_because_batches_would_wait_out_of_order(name: str) -> None:
    columns = [
        {"name": one, "dtype": "float32", "scope": "response"} | ({"source": "trainer"} if one == name else {})
        for one in ("old_logprobs", "ref_logprobs")
    ]
    settings = HALF | {"columns": columns, "kl_in_reward": {"coef": 0.5, "estimator": "k1"}}
    with pytest.raises(
        InvalidArgumentError, match=f"they wait for the column {name}, which trainers write in any order"
    ):
        parse_config(make_config() | settings)


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from("ab"), st.floats(-100, 100, width=32)), min_size=1, max_size=4), min_size=1
    ),
    st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    st.integers(1, 5),
)
@LAW
def test_groups_in_one_batch_or_in_several_have_the_same_advantages(
    groups: list[list[tuple[str, float]]], decay: float, size: int
) -> None:
    """What `rae` computes depends on the order of trajectories alone."""
    expected, running = [], dict.fromkeys("ab", 0.0)
    for agent, score in (one for group in groups for one in group):
        expected.append(score - running[agent])
        running[agent] = decay * running[agent] + (1 - decay) * score
    computed: list[float] = []
    baselines: dict[BaselineKey, float] = {}
    for begin in range(0, len(groups), size):
        part = groups[begin : begin + size]
        rows = [row for at, group in enumerate(part) for row in rows_of(group, uid=f"g{at}")]
        advantages, baselines = estimated(rows, baselines, train_batch_size=size, rae={"decay": decay})
        computed += advantages
    assert computed == expected
    assert {key.agent: value for key, value in baselines.items()}.items() <= running.items()


def test_merging_and_layout_change_nothing() -> None:
    rows = [
        make_row(sample=sample, step=step, last=step == 1, prompt=[1, 2, 7][: 2 + step], reward=float(sample))
        for sample in range(4)
        for step in range(2)
    ]
    computed = [
        advantages_of(rows, make_config() | HALF | changes)
        for changes in (
            {"merge": "none"},
            {"merge": "prefix"},
            {"merge": "tree", "layout": "packed"},
            {"dp_size": 2},
        )
    ]
    assert computed == [computed[0]] * 4
