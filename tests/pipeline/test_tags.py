"""Figures of each environment or task, and where tags are in plans and shards."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill._wire.rows import from_rows, to_rows
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import parse_config
from gristmill_service.pipeline import BuiltBatch, build_batch
from tests import naive
from tests.run.harness import CONFIG, group_rows, row
from tests.strategies import LAW, Row, batches_and_settings


def built(rows: list[Row], **settings: Any) -> BuiltBatch:
    return build_batch(from_rows(rows), parse_config(CONFIG | settings), run="r", batch=0)


def test_the_plan_lists_the_tag_of_each_group_and_its_figures() -> None:
    one = built([*group_rows("a", tag="math", response=range(5)), *group_rows("b")])
    assert one.plan.tags == ["math", ""]
    assert one.plan.tag_metrics["math"] == {
        "prompts": 1,
        "trajectories": 2,
        "score_mean": 0.5,
        "reward_mean": 0.5,
        "pass_at_n": 1.0,
        "response_length_mean": 5.0,
        "rows": 2,
        "tokens": 14,
        "loss_tokens": 10,
        "padding_tokens": 0,
        "padding_share": 0.0,
    }
    counts = one.stats().tags["math"]
    assert (counts.groups, counts.score_sum, counts.padding_share) == (1, 1.0, 0.0)


def test_one_row_that_names_the_tag_is_enough() -> None:
    assert built([row("a"), row("a", 1, tag="math"), *group_rows("b")]).plan.tags == ["math", ""]


def test_without_tags_plan_and_shards_are_as_before() -> None:
    one = built([*group_rows("a"), *group_rows("b")])
    assert (one.plan.tags, one.plan.tag_metrics) == ([], {})
    assert "tags" not in naive.read_shard(one.shards[0])[1]


def test_shards_name_the_tag_of_each_row() -> None:
    one = built([*group_rows("a", 1, tag="math"), *group_rows("b", 1)], policy_mini_batch_size=2, dp_size=3)
    tags = [naive.read_shard(shard)[1]["tags"] for shard in one.shards]
    assert tags == [["math"], [""], [""]], "the last is a padding row"


def test_rows_of_a_group_that_disagree_are_refused_naming_both() -> None:
    with pytest.raises(
        InvalidArgumentError, match="uid 'a' sample 1 step 0: tag 'y' differs from the group's tag 'x'; use"
    ):
        built([row("a", tag="x"), row("a", 1, tag="y")])


def test_fewer_groups_of_a_tag_than_its_share_are_counted() -> None:
    rows = [*group_rows("a", tag="math"), *group_rows("b")]
    for share, short in ((0.5, 0), (0.6, 1)):
        assert built(rows, tag_shares={"math": {"min": share}}).plan.counts["tags_short"] == short


@LAW
@given(batches_and_settings(pad_rows_to_multiple_of=1), st.data())
def test_the_figures_of_all_tags_together_are_those_of_the_batch(
    drawn: tuple[list[Row], dict[str, Any]], data: st.DataObject
) -> None:
    rows, config = drawn
    tags = {uid: data.draw(st.sampled_from(["", "x", "y"])) for uid in dict.fromkeys(row["uid"] for row in rows)}
    tagged = [row | {"tag": tags[row["uid"]]} for row in rows]
    one = build_batch(from_rows(tagged), parse_config(config), run="r", batch=0)
    assert list(from_rows(to_rows(from_rows(tagged))).tags or [""] * len(rows)) == [row["tag"] for row in tagged]
    by_tag, whole = one.plan.tag_metrics.values(), one.plan.metrics
    if not any(tags.values()):
        assert not by_tag
        return
    for name in ("trajectories", "tokens"):
        assert sum(figures[name] for figures in by_tag) == whole[name]
    assert sum(figures["prompts"] for figures in by_tag) == one.plan.prompts
    scores = sum(figures["score_mean"] * figures["trajectories"] for figures in by_tag)
    assert scores == pytest.approx(whole["score_mean"] * whole["trajectories"])
    policy = [part for part in one.plan.mini_batches if part.model == "policy"]
    assert sum(figures["rows"] for figures in by_tag) == sum(part.rows for part in policy)
    assert sum(figures["loss_tokens"] for figures in by_tag) == sum(part.loss_tokens for part in policy)
    padding = whole["padding_tokens"] - sum(figures["padding_tokens"] for figures in by_tag)
    in_padding_rows = sum(
        len(row["sequences"]) if "attention_mask" not in row else len(row["attention_mask"])
        for shard in one.shards
        if shard.address.model == "policy"
        for row in naive.shard_rows(shard)
        if row["is_padding"]
    )
    assert padding == in_padding_rows
