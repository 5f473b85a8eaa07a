"""Laws of a batch's figures, over drawn batches and settings."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gristmill._wire.rows import from_rows
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import parse_config
from gristmill_service.pipeline import BuiltBatch, build_batch
from tests.strategies import LAW, Row, batches_and_settings


def built(rows: list[Row], config: dict[str, Any], **more: Any) -> BuiltBatch:
    try:
        return build_batch(from_rows(rows), parse_config(config), run="r", batch=0, **more)
    except InvalidArgumentError:
        # What cannot be aligned makes no batch.
        assume(False)
        raise


@LAW
@given(batches_and_settings(max_staleness=1, stale="drop"))
def test_every_row_and_token_is_counted_as_one_thing(drawn: tuple[list[Row], dict[str, Any]]) -> None:
    rows, config = drawn
    stats = built(rows, config, policy_version=3).stats()
    tokens = sum(len(row["prompt_token_ids"]) + len(row["response_ids"]) for row in rows)
    assert stats.rows == len(rows) == stats.merged + stats.trained + stats.stale_rows + stats.misaligned_rows
    assert stats.submitted_tokens == tokens
    assert min(stats.merged, stats.stale_rows, stats.misaligned_rows, stats.padding, stats.padding_tokens) >= 0
    assert min(stats.merged_tokens, stats.stale_tokens, stats.misaligned_tokens) >= 0
    assert stats.loss_tokens <= stats.tokens


@LAW
@given(batches_and_settings(pad_rows_to_multiple_of=1), st.booleans())
def test_padding_is_what_the_plan_says_and_what_its_own_level_would_have(
    drawn: tuple[list[Row], dict[str, Any]], drops: bool
) -> None:
    rows, config = drawn
    if drops:
        config = {key: value for key, value in config.items() if key != "critic_mini_batch_size"}
        config |= {"on_misaligned": "drop_trailing"}
    batch = built(rows, config)
    stats, metrics = batch.stats(), batch.plan.metrics
    shares = stats.padding_shares
    assert shares["laid_out"] == pytest.approx(metrics["padding_share"])
    assert stats.padding_tokens == metrics["padding_tokens"]
    assert stats.padding == metrics["padding_rows"]
    level = "packed" if config["layout"] == "packed" else config["pad_width"]
    assert shares[level] == pytest.approx(shares["laid_out"])
    assert shares["packed"] <= shares["micro_batch"] + 1e-9 <= shares["batch"] + 2e-9


@LAW
@given(batches_and_settings(merge="prefix"))
def test_each_row_beyond_a_trajectorys_first_has_one_cause(drawn: tuple[list[Row], dict[str, Any]]) -> None:
    rows, config = drawn
    batch = built(rows, config)
    trajectories = len({(row["uid"], row["sample"]) for row in rows})
    assert sum(batch.stats().mismatches.values()) == batch.plan.rows - trajectories
