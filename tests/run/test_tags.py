"""The environment or task of groups, and batches with a set number of each."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.errors import InvalidArgumentError, ResourceExhaustedError
from gristmill_service.monitoring.health.health import health
from gristmill_service.run.machine.answers import Position, TagGroups
from gristmill_service.run.machine.decisions.resume import Checkpoint
from gristmill_service.run.machine.events import BatchSealed, GroupKey, TagWait
from gristmill_service.run.waiters import there_is_room
from tests.metrics.scraping import scraped
from tests.on_loop import on_loop
from tests.run.harness import Bench, BuildBatch, group_rows, key, row


def tags(bench: Bench) -> dict[str, str]:
    return {group.key.uid: group.tag for group in bench.state.open.values()}


def begin(bench: Bench, **by_uid: str) -> list[str]:
    """Begins groups, each with its tag."""
    answer = bench.run.begin_groups(0, list(by_uid), (), list(by_uid.values()))
    return [admission.name for admission in answer.admissions]


class TestNaming:
    def test_a_group_has_the_tag_that_it_is_begun_with_or_that_a_row_of_it_names(self) -> None:
        bench = Bench(train_batch_size=4)
        begin(bench, a="math", b="")
        bench.submit(row("b"), row("b", 1, tag="code"), row("c", tag="math"), row("d"))
        assert tags(bench) == {"a": "math", "b": "code", "c": "math", "d": ""}
        begin(bench, d="code", a="math")
        assert tags(bench)["d"] == "code"
        assert bench.replayed() == bench.state

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            (
                [row("a", tag="code")],
                r"uid 'a' sample 0 step 0: tag 'code' differs from the group's tag 'math'; use one tag",
            ),
            (
                [row("b", tag="x"), row("b", 1, tag="y")],
                r"uid 'b' sample 1 step 0: tag 'y' differs from the group's tag 'x'",
            ),
        ],
    )
    def test_rows_that_disagree_are_refused_and_nothing_of_the_request_is_kept(
        self, rows: list[Any], message: str
    ) -> None:
        bench = Bench()
        begin(bench, a="math")
        with pytest.raises(InvalidArgumentError, match=message):
            bench.submit(row("new"), *rows)
        assert tags(bench) == {"a": "math"}
        assert not bench.rows

    def test_beginning_a_group_again_with_another_tag_is_refused(self) -> None:
        bench = Bench()
        begin(bench, a="math")
        with pytest.raises(InvalidArgumentError, match="uid 'a': tag 'code' differs from the group's tag 'math'"):
            begin(bench, b="code", a="code")
        with pytest.raises(InvalidArgumentError, match="tags has 1 entries for 2 uids"):
            bench.run.begin_groups(0, ["a", "b"], (), ["math"])
        with pytest.raises(InvalidArgumentError, match="uid 'c': tag has 101 characters, and the limit is 100"):
            begin(bench, c="x" * 101)
        assert tags(bench) == {"a": "math"}

    def test_a_run_has_64_different_tags_at_most(self) -> None:
        bench = Bench(max_buffered_batches=100)
        begin(bench, **{f"u{number}": f"t{number}" for number in range(64)})
        bench.run.abort_groups(0, [f"u{number}" for number in range(64)], "")
        with pytest.raises(InvalidArgumentError, match="uid 'new': the run would have more than 64 tags"):
            begin(bench, new="t64")
        with pytest.raises(
            InvalidArgumentError, match="uid 'new' sample 0 step 0: the run would have more than 64 tags"
        ):
            bench.submit(row("new", tag="t64"))
        assert begin(bench, new="t0") == ["ADMITTED"]

    def test_batches_and_exports_have_the_tag_on_every_row(self) -> None:
        bench = Bench(train_batch_size=2)
        begin(bench, a="math")
        bench.submit(*group_rows("a"), row("b"), row("b", 1, tag="code"))
        bench.make_batches()
        assert bench.build_batch.batches[0].tags == ["math", "math", "code", "code"]
        assert [tag for part in bench.run.export(0) for tag in part.tags or ()] == ["math", "math", "code", "code"]

    def test_groups_and_status_say_what_became_of_the_groups_of_each_tag(self) -> None:
        bench = Bench(train_batch_size=1, max_buffered_batches=8, build_batch=BuildBatch(fails=[1]))
        begin(bench, a="math", b="math", c="code", d="code", e="code", f="")
        bench.submit(*group_rows("a"), *group_rows("b"))
        bench.make_batches()
        bench.run.abort_groups(0, ["c"], "crashed")
        bench.run.resume("policy", Checkpoint(Position(1), give_up_reason="lost"), "second")
        bench.submit(*group_rows("e"))
        assert {group.uid: (group.state, group.tag) for part in bench.run.groups() for group in part} == {
            "a": ("dropped", "math"),
            "b": ("dropped", "math"),
            "c": ("dropped", "code"),
            "d": ("open", "code"),
            "e": ("sealed", "code"),
            "f": ("open", ""),
        }
        tags = bench.run.status().tags
        assert tags == {"math": TagGroups(0, 0, 0, 2), "code": TagGroups(1, 0, 1, 1)}
        assert bench.replayed() == bench.state

    def test_without_tags_there_are_none(self) -> None:
        bench = Bench(train_batch_size=1)
        bench.submit(*group_rows("a"))
        bench.make_batches()
        assert bench.build_batch.batches[0].tags is None


SHARES: dict[str, Any] = {"tag_shares": {"math": {"min": 0.5}}, "tag_timeout_s": 10.0}


def complete(bench: Bench, **by_uid: str) -> None:
    for uid, tag in by_uid.items():
        bench.submit(*group_rows(uid, tag=tag))


class TestShares:
    def test_a_batch_waits_for_its_share_of_a_tag(self) -> None:
        bench = Bench(**SHARES)
        complete(bench, a="code", b="code")
        assert not bench.sealed
        complete(bench, c="math")
        assert bench.log.events[-1] == BatchSealed(0, (GroupKey(0, "a"), GroupKey(0, "c")), 0)
        assert bench.state.complete.keys() == {GroupKey(0, "b")}

    def test_more_than_its_share_may_come_of_a_tag(self) -> None:
        bench = Bench(**SHARES)
        complete(bench, a="math", b="math")
        assert bench.sealed == [0]

    def test_in_order_of_admission_groups_that_find_no_place_are_passed_over(self) -> None:
        bench = Bench(**SHARES, seal_order="admission")
        begin(bench, a="code", b="code", c="math", d="math")
        complete(bench, d="math", b="code", a="code")
        assert not bench.sealed, "the first group of the tag is not complete yet"
        complete(bench, c="math")
        bench.make_batches()
        assert [bench.uids(0), bench.uids(1)] == [["a", "c"], ["b", "d"]]

    def test_after_the_timeout_a_batch_is_sealed_without_and_counted(self) -> None:
        bench = Bench(**SHARES)
        complete(bench, a="code", b="code")
        for bench.now in (0.5, 5.0, 10.4):
            bench.let_pass(0.0)
        assert not bench.sealed
        bench.now = 10.5
        bench.let_pass(0.0)
        assert bench.log.events[-1] == BatchSealed(0, (GroupKey(0, "a"), GroupKey(0, "b")), 0, ("math",))
        assert scraped([bench.run]).of("gristmill_tag_short_batches_total") == {"math": 1}
        assert bench.state.tag_wait is None

    def test_the_wait_restarts_with_each_batch_and_is_over_when_nothing_could_be_sealed(self) -> None:
        bench = Bench(**SHARES)
        complete(bench, a="code", b="code")
        bench.let_pass(0.0)
        bench.submit(row("a", 0, attempt=1, last=False))
        bench.now = 20.0
        bench.let_pass(0.0)
        assert bench.log.events[-1] == TagWait(None)
        bench.submit(row("a", 0, 1, attempt=1, reward=5.0))
        bench.let_pass(0.0)
        bench.now = 29.9
        bench.let_pass(0.0)
        assert not bench.sealed
        assert bench.replayed() == bench.state

    def test_after_the_timeout_others_may_have_the_room_that_was_kept(self) -> None:
        bench = Bench(**SHARES, max_buffered_batches=1)
        assert begin(bench, a="code", b="code") == ["ADMITTED", "NO_ROOM"]
        woken: list[str] = []
        bench.run.wait(there_is_room("code"), lambda: woken.append("code"))
        for bench.now in (0.0, 10.0):
            bench.let_pass(0.0)
        assert woken == ["code"]
        complete(bench, a="code", b="code")
        assert bench.log.events[-1] == BatchSealed(0, (GroupKey(0, "a"), GroupKey(0, "b")), 0, ("math",))
        assert bench.replayed() == bench.state

    def test_without_a_timeout_it_waits(self) -> None:
        bench = Bench(tag_shares=SHARES["tag_shares"])
        complete(bench, a="code", b="code")
        bench.now = 1e6
        bench.let_pass(0.0)
        assert not bench.sealed

    def test_an_explicit_seal_and_the_end_take_what_there_is_first_of_the_tags(self) -> None:
        bench = Bench(**SHARES, train_batch_size=4)
        complete(bench, a="code", b="code", c="math")
        assert bench.run.seal(None).prompts == 3
        assert bench.state.batches[0].groups[-1].key.uid == "c"
        complete(bench, d="code", e="code", f="code", g="code", h="code", i="math")
        assert bench.run.finish() == 3
        bench.make_batches()
        assert [bench.uids(1), bench.uids(2)] == [["d", "e", "f", "i"], ["g", "h"]]
        sealed = [event for event in bench.log.events if isinstance(event, BatchSealed)]
        assert [event.short_tags for event in sealed] == [("math",)] * 3

    def test_what_a_batch_waits_for_is_reported(self) -> None:
        bench = Bench(**SHARES)
        complete(bench, a="code", b="code")
        begin(bench, c="math")
        report = on_loop(health, bench.run)
        assert "2 of 2 groups are complete; tag_shares lacks 1 of tag 'math'" in report.findings[0].text
        assert [group.tag for group in report.open_groups] == ["math"]

    def test_room_is_kept_for_the_tags_that_a_batch_waits_for(self) -> None:
        bench = Bench(**SHARES, max_buffered_batches=1)
        assert begin(bench, a="code", b="code") == ["ADMITTED", "NO_ROOM"]
        answer = bench.run.begin_groups(0, ["b"], (), ["code"])
        assert answer.reason == "the 1 groups that may begin are reserved for the tags 'math' (tag_shares)"
        with pytest.raises(
            ResourceExhaustedError, match=r"no capacity for another .* are reserved for the tags 'math'"
        ):
            bench.submit(row("b", tag="code"))
        assert begin(bench, b="", c="math", d="math") == ["NO_ROOM", "ADMITTED", "NO_ROOM"]

    def test_who_waits_for_room_that_is_kept_sleeps_until_there_is_other(self) -> None:
        bench = Bench(**SHARES, max_buffered_batches=1)
        begin(bench, a="code")
        woken: list[str] = []
        bench.run.wait(there_is_room("code"), lambda: woken.append("code"))
        bench.run.wait(there_is_room("math"), lambda: woken.append("math"))
        assert woken == ["math"]
        bench.run.abort_groups(0, ["a"], "")
        assert woken == ["math", "code"]

    @settings(max_examples=150, deadline=None)
    @given(
        st.lists(st.sampled_from(["math", "code", ""]), min_size=1, max_size=14),
        st.sampled_from(["completion", "admission"]),
        st.sampled_from([{"math": 0.5}, {"math": 0.25, "code": 0.5}, {"code": 1.0}]),
    )
    def test_every_full_batch_has_its_shares_and_no_group_is_lost(
        self, given_tags: list[str], order: str, shares: dict[str, float]
    ) -> None:
        bench = Bench(
            train_batch_size=4,
            seal_order=order,
            tag_shares={tag: {"min": share} for tag, share in shares.items()},
            max_buffered_batches=8,
        )
        uids = {f"u{number}": tag for number, tag in enumerate(given_tags)}
        admitted = [uid for uid, admission in zip(uids, begin(bench, **uids), strict=True) if admission == "ADMITTED"]
        for uid in reversed(admitted):
            bench.submit(*group_rows(uid))
        for batch in bench.state.batches.values():
            sealed = Counter(group.tag for group in batch.groups)
            assert all(sealed[tag] >= share * 4 for tag, share in shares.items())
        bench.run.finish()
        bench.make_batches()
        trained = [uid for batch in bench.build_batch.batches for uid in bench.uids(batch)]
        assert sorted(trained) == sorted(admitted)
        assert all((counts.open, counts.complete) == (0, 0) for counts in bench.state.tags.values())

    def test_the_tag_of_a_group_is_kept_while_others_are_trained(self) -> None:
        bench = Bench(**SHARES)
        complete(bench, a="code", b="code", c="math")
        bench.make_batches()
        for mini_batch in range(2):
            bench.run.acknowledge("policy", 0, Position(0, 0, mini_batch), 0, commit=True)
        bench.run.abort_trajectories([key("b", 1)], "")
        assert (bench.state.tags["code"].open, bench.state.tags["code"].complete) == (1, 1)
