"""Laws of a batch's counts, over drawn batches and settings."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gristmill._wire.rows import from_rows
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import parse_config
from gristmill_service.pipeline import Batch, mill
from tests.strategies import batches_and_settings


def milled(rows, config, **more) -> Batch:
    try:
        return mill(from_rows(rows), parse_config(config), run="r", batch=0, **more)
    except InvalidArgumentError:
        # What cannot be aligned makes no batch.
        assume(False)
        raise


@settings(max_examples=100)
@given(batches_and_settings(max_staleness=1, stale="drop"))
def test_every_row_and_token_is_counted_as_one_thing(drawn):
    rows, config = drawn
    census = milled(rows, config, policy_version=3).census()
    tokens = sum(len(row["prompt_token_ids"]) + len(row["response_ids"]) for row in rows)
    for counted, dropped, total in (
        (census.rows, census.dropped_rows, len(rows)),
        (census.tokens, census.dropped_tokens, tokens),
    ):
        assert counted["submitted"] == total
        assert total == counted["merged"] + counted["trained"] + sum(dropped.values())
        assert min(*counted.values(), *dropped.values()) >= 0
    assert census.tokens["loss"] <= census.tokens["trained"]


@settings(max_examples=100)
@given(batches_and_settings(), st.booleans())
def test_padding_is_what_the_plan_says_and_what_its_own_level_would_have(drawn, drops):
    rows, config = drawn
    if drops:
        config = {key: value for key, value in config.items() if key != "critic_mini_batch_size"}
        config |= {"on_misaligned": "drop_trailing"}
    batch = milled(rows, config)
    census, metrics = batch.census(), batch.plan["metrics"]
    assert census.padding["laid_out"] == pytest.approx(metrics["padding_share"])
    assert census.tokens["padding"] == metrics["padding_tokens"]
    assert census.rows["padding"] == metrics["padding_rows"]
    level = "packed" if config["layout"] == "packed" else config["pad_width"]
    assert census.padding[level] == pytest.approx(census.padding["laid_out"])
    assert census.padding["packed"] <= census.padding["micro_batch"] + 1e-9 <= census.padding["batch"] + 2e-9


@settings(max_examples=100)
@given(batches_and_settings(merge="prefix"))
def test_each_row_beyond_a_trajectorys_first_has_one_cause(drawn):
    rows, config = drawn
    batch = milled(rows, config)
    trajectories = len({(row["uid"], row["sample"]) for row in rows})
    assert sum(batch.census().mismatches.values()) == batch.plan["rows"] - trajectories
