"""What a batch becomes with other settings is what a run with those settings makes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gristmill._wire.rows import from_rows
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import parse_config
from gristmill_service.pipeline import build_batch
from gristmill_service.pipeline.alternatives import (
    FREED,
    Alternative,
    Outcome,
    Sealed,
    changed,
    compared,
    compared_outline,
    parse_all,
    parse_changes,
    usual,
)
from tests import naive
from tests.rows import make_config, make_row
from tests.strategies import LAW, Row, batches_and_settings


def first(rows: list[Row], config: dict[str, Any], version: int | None = 3) -> Alternative:
    try:
        return next(compared([Sealed(from_rows(rows), version)], parse_config(config), []))
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
def test_as_configured_is_what_the_plan_and_the_shards_have(
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
    figures = first(rows, config).figures
    batch = build_batch(from_rows(rows), parse_config(config), run="r", batch=0, policy_version=3)
    metrics, policy = batch.plan.metrics, [part for part in batch.plan.mini_batches if part.model == "policy"]
    assert figures["steps"] == batch.plan.optimizer_steps
    assert figures["rows"] == sum(part.rows for part in policy)
    assert figures["loss_tokens"] == sum(part.loss_tokens for part in policy)
    assert figures["padding_rows"] == metrics["padding_rows"]
    assert figures["tokens"] - metrics["padding_tokens"] == metrics.get("distinct_tokens", metrics["tokens"])
    assert figures["padding_share"] == pytest.approx(metrics["padding_share"])
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


@LAW
@given(batches_and_settings(), st.sampled_from([1, 2]))
def test_an_alternative_is_what_a_run_with_its_settings_makes(
    drawn: tuple[list[Row], dict[str, Any]], batches: int
) -> None:
    rows, config = drawn
    first(rows, config)
    settings = parse_config(config)
    others = [*usual(settings), {"dp_size": 1, "vpp_size": 1}, {"policy_mini_batch_size": 1}, {"gamma": 0.5}]
    _, *alternatives = compared([Sealed(from_rows(rows), 3)] * batches, settings, others)
    for changes, alternative in zip(others, alternatives, strict=True):
        try:
            own = next(compared([Sealed(from_rows(rows), 3)] * batches, changed(settings, changes), [])).figures
        except InvalidArgumentError as error:
            own = Alternative("", None, str(error)).figures
        assert alternative.figures == own | {"setting": alternative.name}


def test_batches_are_summed() -> None:
    """Two batches with advantages of 2 and -4 in one token each, of two groups with and without an advantage."""
    config = parse_config(make_config(advantage_estimator="none", train_batch_size=2, layout="packed"))

    def sealed(*advantages: float) -> Sealed:
        rows = [make_row(f"p{number}", advantage=value) for number, value in enumerate(advantages)]
        return Sealed(from_rows(rows))

    one, other, both = (
        next(compared(batches, config, [])).outcome
        for batches in ([sealed(2, 0)], [sealed(-4, 0)], [sealed(2, 0), sealed(-4, 0)])
    )
    assert isinstance(one, Outcome)
    assert isinstance(other, Outcome)
    assert both == one.joined(other)
    assert (both.steps, both.groups, both.rows, both.zero_groups, both.advantages) == (4, 4, 4, 2, -2.0)
    assert both.largest == 4


def test_settings_are_parsed_as_yaml() -> None:
    assert parse_changes("advantage_estimator=rloo, whiten=batch") == {"advantage_estimator": "rloo", "whiten": "batch"}
    assert parse_changes("micro_batch={size: 2},zero_variance_filter=null,lambda=0.5") == {
        "micro_batch": {"size": 2},
        "zero_variance_filter": None,
        "lambda": 0.5,
    }


@pytest.mark.parametrize(
    "text", ["", "rloo", "merge", "={", "merge=[", "merge: none", "=", "=none", "MERGE=none", "merge=none, whiten"]
)
def test_what_is_no_list_of_settings_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="write NAME=VALUE, separated by commas"):
        parse_changes(text)


@pytest.mark.parametrize(
    "text",
    [
        *(f"gamma={value}" for value in ("9" * 4500, "[" * 3000, "2026-99-01", "2026-01-01", "!!set {a}", "[" * 9999)),
        "micro_batch={2026-01-01: 1}",
        # With more of such lists a few hundred characters become gigabytes.
        "micro_batch={a: &a [1, 1, 1], b: &b [*a, *a, *a], c: [*b, *b, *b]}",
    ],
    ids=lambda text: text[:20],
)
def test_values_that_no_setting_could_have_are_refused_and_no_errors_of_the_service(text: str) -> None:
    """The page's API answered 500 to them."""
    with pytest.raises(InvalidArgumentError, match="write NAME=VALUE, separated by commas"):
        parse_changes(text)


def test_a_setting_given_twice_is_refused() -> None:
    """The last value was taken, silently."""
    with pytest.raises(InvalidArgumentError, match="'merge=none,merge=prefix' sets merge twice; write its other value"):
        parse_changes("merge=none,merge=prefix")
    assert parse_changes("length_penalty={turns: 0.5, output_tokens: 1},gamma=0.5")["gamma"] == 0.5


def test_a_chosen_alternative_that_is_usual_too_is_listed_once() -> None:
    settings = parse_config(make_config())
    alternatives = parse_all(["layout=packed", "usual"], settings)
    assert alternatives[0] == {"layout": "packed"}
    assert [*alternatives].count({"layout": "packed"}) == 1
    assert len(alternatives) == len([*usual(settings)])


@pytest.mark.parametrize("name", ["train_batch_size", "n_samples_per_prompt", "columns", "group_timeout_s", "seal_by"])
def test_settings_by_which_rows_came_cannot_be_changed(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{name} decides which rows a batch has"):
        changed(parse_config(make_config()), {name: 4})


@LAW
@given(
    batches_and_settings(max_staleness=1),
    st.sampled_from(["count", "drop", "mask"]),
    st.sampled_from([None, "mask"]),
)
def test_an_outline_answers_like_the_rows_or_not_at_all(
    drawn: tuple[list[Row], dict[str, Any]], stale: str, zero: str | None
) -> None:
    rows, config = drawn
    config |= {"stale": stale, "zero_variance_filter": zero, "overlong_filter": ["length"]}
    settings = parse_config(config)
    try:
        batch = build_batch(from_rows(rows), settings, run="r", batch=0, policy_version=3)
    except InvalidArgumentError:
        assume(False)
        raise
    assume(batch.plan.rows)
    others = [*usual(settings), {"dp_size": 2}, {"micro_batch": {"size": 2}}, {"layout": "packed"}]
    outline = batch.stats().outline
    # A batch of which merging left trained tokens out has none, and is compared by its rows.
    assert outline or settings.retokenized_tail
    assume(outline)
    known = list(compared_outline(outline, settings, others))
    for answer, expected in zip(known, compared([Sealed(from_rows(rows), 3)], settings, others), strict=True):
        if answer.reason != FREED:
            numbers, others_numbers = answer.figures, expected.figures
            assert numbers.pop("reason").partition(": ")[0] == others_numbers.pop("reason").partition(": ")[0]
            assert numbers == pytest.approx(others_numbers)
    answered = {answer.name for answer in known if answer.outcome is not None}
    assert answered >= {"", "dp_size: 2"}
    assert not answered & {"merge: prefix", "layout: prefix_tree", "advantage_estimator: reinforce++"}
