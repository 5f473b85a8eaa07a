"""A policy version a token: weights change while a trajectory is sampled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill._wire.codecs import row_codec, submit_codec
from gristmill._wire.rows import from_rows, to_rows
from gristmill._wire.steps import Steps, concat
from gristmill.errors import AlreadyExistsError, InvalidArgumentError
from gristmill_service.config import parse_config
from gristmill_service.pipeline import BuiltBatch, build_batch
from gristmill_service.storage import row_tables
from tests import naive
from tests.run.harness import CONFIG, Bench, row
from tests.strategies import LAW, Row, batches_and_settings


def versions(table: Steps) -> list[list[int]]:
    assert table.token_versions is not None
    return [array.tolist() for array in table.token_versions.arrays()]


def built(rows: list[Row], **settings: Any) -> BuiltBatch:
    return build_batch(from_rows(rows), parse_config(CONFIG | settings), run="r", batch=0)


@st.composite
def versioned(draw: st.DrawFn) -> tuple[list[Row], dict[str, Any]]:
    """Rows of which some have one version per token."""
    rows, config = draw(batches_and_settings())
    kept = []
    for one in rows:
        if draw(st.booleans()):
            size = len(one["response_ids"])
            one = {
                **one,
                "policy_version": -1,
                "policy_versions": draw(st.lists(st.integers(-1, 4), min_size=size, max_size=size)),
            }
        kept.append(one)
    return kept, config


def versions_sent(one: Row) -> list[int]:
    return list(one.get("policy_versions") or [one["policy_version"]] * len(one["response_ids"]))


class TestRows:
    def test_a_rows_version_is_the_oldest_that_is_known_of_its_tokens(self) -> None:
        given_rows = [
            row("a", response=(7, 8, 9), policy_versions=[3, -1, 2]),
            row("a", 1, response=(7, 8), policy_versions=[-1, -1]),
            row("b", response=(7, 8), policy_version=5),
        ]
        table = from_rows(given_rows)
        assert table.policy_versions.tolist() == [2, -1, 5]
        assert versions(table) == [[3, -1, 2], [-1, -1], [5, 5]]

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"policy_versions": [1]}, "policy_versions has 1 values, but response_ids has 2"),
            ({"policy_versions": [1, -2]}, r"policy_versions\[1\] is -2; it must be at least -1"),
            ({"policy_versions": [1, 2**31]}, r"policy_versions\[1\] is 2147483648; it must be -1 .* or 0"),
            ({"policy_versions": [1.5, 2]}, "policy_versions has float64 values"),
            ({"policy_versions": [2, 3], "policy_version": 1}, "policy_version is 1, but the oldest .* is 2; omit"),
        ],
    )
    def test_wrong_versions_are_refused_with_the_trajectory(self, fields: Row, message: str) -> None:
        with pytest.raises(InvalidArgumentError, match=f"uid 'a' sample 0 step 0: {message}"):
            from_rows([row("a", response=(7, 8), **fields)])

    @LAW
    @given(versioned())
    def test_they_survive_whatever_sends_and_stores_them(self, drawn: tuple[list[Row], dict[str, Any]]) -> None:
        rows, _ = drawn
        table = from_rows(rows)
        if table.token_versions is None:
            return
        sent = submit_codec.Submission(submit_codec.encode("r", [table])).rows().steps
        stored = row_tables.encode(table)
        data = memoryview(b"".join(stored.buffers))
        for copy in (
            row_codec.decode(row_codec.encode(table)),
            sent,
            row_tables.decode(data),
            from_rows(to_rows(table)),
        ):
            assert versions(copy) == versions(table) == [versions_sent(one) for one in rows]
            assert copy.policy_versions.tolist() == table.policy_versions.tolist()

    def test_next_to_rows_that_say_them_others_have_their_own_for_all_tokens(self) -> None:
        tables = [from_rows([row("a", policy_versions=[4])]), from_rows([row("b", response=(7, 8), policy_version=2)])]
        assert versions(concat(tables)) == [[4], [2, 2]]

    def test_a_row_is_the_same_whichever_rows_it_comes_with(self) -> None:
        bench = Bench()
        alone, other = row("a", policy_version=3), row("b", policy_versions=[4])
        assert bench.submit(alone) == ["ACCEPTED"]
        assert bench.submit(alone, other) == ["DUPLICATE", "ACCEPTED"]
        with pytest.raises(AlreadyExistsError):
            bench.submit(row("b", response=(7,), policy_versions=[5]))


class TestShards:
    @LAW
    @given(versioned())
    def test_each_token_has_its_version_and_all_else_is_unknown(self, drawn: tuple[list[Row], dict[str, Any]]) -> None:
        rows, config = drawn
        groups = naive.merged(rows, config["merge"], config.get("retokenized_tail", 0))
        given_any = any("policy_versions" in one for one in rows)
        for shard in build_batch(from_rows(rows), parse_config(config), run="r", batch=0).shards:
            for shown in naive.shard_rows(shard):
                assert ("token_policy_version" in shown) == given_any
                if not given_any:
                    continue
                if shown["is_padding"]:
                    assert (shown["token_policy_version"] == -1).all()
                    continue
                group = groups[int(shown["row"])]
                standing = zip(group.standing(versions_sent), group.sources, strict=True)
                expected = [-1 if source is None else version for version, source in standing]
                values = shown["token_policy_version"]
                assert values.dtype == np.int32
                assert values[len(values) - len(expected) :].tolist() == expected
                assert (values[: len(values) - len(expected)] == -1).all()
                known = [version for step in group.steps for version in versions_sent(step) if version >= 0]
                assert shown["policy_version"] == min(known, default=-1)


class TestMasking:
    def test_only_the_tokens_that_are_too_far_behind_are_masked_and_counted(self) -> None:
        rows = [
            row("a", response=(7, 8, 9), loss_mask=[1, 1, 0], policy_versions=[1, 3, 1]),
            row("a", 1, policy_version=1, reward=0.0),
            row("b", policy_version=5),
            row("b", 1),
        ]
        one = built(rows, stale="mask", max_staleness=2, policy_mini_batch_size=2)
        (shard,) = one.shards
        masks = [padded["loss_mask"].tolist() for padded in naive.shard_rows(shard)]
        assert masks == [[0, 1, 0], [0], [1], [1]]
        assert one.plan.counts["stale_tokens"] == 2
        assert one.plan.counts["stale_groups"] == 1, "it stays"
        assert one.plan.prompts == 2
        assert one.plan.mini_batches[0].loss_tokens == 3
        assert one.plan.metrics["score_mean"] == 0.75

    def test_the_service_masks_by_the_version_that_holds_when_the_batch_is_sealed(self) -> None:
        steps = from_rows([row("a", policy_versions=[1]), row("a", 1, policy_versions=[2])])
        config = parse_config(CONFIG | {"stale": "mask", "max_staleness": 3, "train_batch_size": 1})
        for version, masked in ((4, 0), (5, 1), (6, 2)):
            made = build_batch(steps, config, run="r", batch=0, policy_version=version)
            assert made.plan.counts["stale_tokens"] == masked
        assert steps.loss_mask.values.all(), "what came in is not modified"

    def test_a_group_that_waits_is_not_dropped(self) -> None:
        bench = Bench(stale="mask", max_staleness=0)
        bench.submit(row("a", policy_version=0), row("a", 1, policy_version=0))
        bench.run.announce(9)
        assert bench.run.status().groups_complete == 1
