"""How far rollouts may be ahead of training: groups that are open, or sealed and not trained."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.errors import InvalidArgumentError, ResourceExhaustedError, StaleIncarnationError
from gristmill_service.monitoring.health.health import health
from gristmill_service.run.machine.answers import Position
from gristmill_service.run.machine.decisions.resume import Checkpoint
from gristmill_service.run.machine.events import GroupKey
from gristmill_service.run.waiters import there_is_room
from tests.run.harness import Bench, BuildBatch, group_rows
from tests.run.paced_runs import outcome_of
from tests.strategies import LAW

NAMES = [f"u{number}" for number in range(40)]


def paced(max_staleness: int | None = 0, **more: Any) -> Bench:
    """A run of one group a batch."""
    return Bench(max_staleness=max_staleness, train_batch_size=1, max_buffered_batches=20, **more)


def fill(bench: Bench) -> int:
    """Begins and completes groups while there is room. Returns how many."""
    closed = bench.state.outcomes([GroupKey(0, uid) for uid in NAMES])
    begun = [uid for uid in NAMES if GroupKey(0, uid) not in closed]
    count = sum(answer == "ADMITTED" for answer in bench.begin(*begun))
    for uid in begun[:count]:
        bench.submit(*group_rows(uid))
    bench.make_batches()
    return count


def acknowledge(bench: Bench, batch: int, *ranks: int, commit: bool = True) -> None:
    for mini_batch in range(bench.state.prompts[batch]):
        for rank in ranks or range(bench.state.dp_size):
            bench.run.acknowledge("policy", rank, Position(batch, 0, mini_batch), 0, commit=commit)


def ask(bench: Bench, batch: int, *ranks: int) -> None:
    """As a trainer's client that goes on to the next batch."""
    bench.run.batch(batch, ranks, "policy")


def refusal(bench: Bench, uid: str = "next") -> str:
    answer = bench.run.begin_groups(0, [uid])
    assert [one.name for one in answer.admissions] == ["NO_ROOM"]
    return str(answer.reason)


@settings(LAW, max_examples=2 * LAW.max_examples)
@given(st.integers(0, 1 << 32))
def test_nobody_waits_for_ever_and_nothing_begins_too_early_whatever_a_trainers_habits(seed: int) -> None:
    _, outcome = outcome_of(seed)
    assert (outcome.deadlock, outcome.beyond, outcome.replaced) == ("", 0, 0)


class TestTrained:
    def test_a_batch_is_trained_when_a_version_was_announced_after_it_was_acknowledged(self) -> None:
        bench = paced()
        assert fill(bench) == 1
        bench.run.announce(1)
        assert fill(bench) == 0, "announced before"
        acknowledge(bench, 0)
        assert bench.run.status().batches_freed == 1
        assert fill(bench) == 0, "acknowledged, and freed: its weights are not out"
        bench.run.announce(2)
        assert fill(bench) == 1

    @pytest.mark.parametrize("before", [False, True])
    def test_or_when_every_rank_asked_for_a_later_one_before_or_after(self, before: bool) -> None:
        bench = paced(dp_size=2)
        fill(bench)
        if before:
            ask(bench, 1, 0, 1)
            assert fill(bench) == 0, "not acknowledged"
        acknowledge(bench, 0)
        if not before:
            assert fill(bench) == 0
            ask(bench, 1, 0)
            assert fill(bench) == 0, "one of two"
            ask(bench, 1, 1)
        assert fill(bench) == 1

    def test_or_when_the_same_version_is_announced_again(self) -> None:
        """A resumed trainer that begins with a version that was announced before has no other one to announce."""
        bench = paced()
        fill(bench)
        bench.run.announce(1)
        acknowledge(bench, 0)
        bench.run.announce(1)
        assert fill(bench) == 1
        events = len(bench.log.events)
        bench.run.announce(1)
        assert len(bench.log.events) == events, "nothing new"

    def test_every_rank_has_to_acknowledge_it(self) -> None:
        bench = paced(dp_size=2)
        fill(bench)
        acknowledge(bench, 0, 0, commit=False)
        bench.run.announce(1)
        ask(bench, 1)
        assert fill(bench) == 0
        acknowledge(bench, 0, 1)
        assert fill(bench) == 1, "all asked before"

    def test_a_rank_that_acknowledges_within_a_batch_has_asked_for_it(self) -> None:
        bench = Bench(max_staleness=1, train_batch_size=2, policy_mini_batch_size=1, max_buffered_batches=20)
        assert fill(bench) == 4
        acknowledge(bench, 0)
        assert fill(bench) == 0
        bench.run.acknowledge("policy", 0, Position(1), 0, commit=True)
        assert fill(bench) == 2

    @pytest.mark.parametrize(
        ("position", "waits", "is_ask"),
        [(None, False, True), (Position(1), False, True), (Position(2), True, True), (Position(2), False, False)],
    )
    def test_a_call_for_a_shard_asks_but_not_one_that_reads_ahead(
        self, position: Position | None, waits: bool, is_ask: bool
    ) -> None:
        bench = paced()
        fill(bench)
        acknowledge(bench, 0)
        bench.run.shard("policy", 0, position, 0, waits=waits)
        assert fill(bench) == int(is_ask)

    def test_reading_what_is_published_is_no_asking(self) -> None:
        """Other processes of the rank read it, while the one that acknowledges sends weights."""
        bench = paced(1)
        fill(bench)
        acknowledge(bench, 0)
        bench.run.shard("policy", 0, Position(1), 0, waits=True)
        bench.run.batch(1)
        bench.run.batch(2)
        assert fill(bench) == 0

    def test_ranks_that_do_not_exist_ask_for_nothing(self) -> None:
        bench = paced(dp_size=2)
        for ranks in ([2], [0, -1], range(1000)):
            with pytest.raises(InvalidArgumentError, match=r"rank -?\d+ does not exist with dp_size 2"):
                bench.run.batch(1, ranks, "policy")
        assert bench.run._writer.asked == {}

    def test_what_critics_ask_for_and_acknowledge_does_not_count(self) -> None:
        bench = paced(critic_mini_batch_size=1)
        fill(bench)
        bench.run.acknowledge("critic", 0, Position(0), 0, commit=True)
        bench.run.batch(1, (), "critic")
        bench.run.shard("critic", 0, None, 0)
        bench.run.announce(1)
        assert fill(bench) == 0


class TestWindow:
    def test_open_groups_and_those_not_trained_are_at_most_so_many_batches(self) -> None:
        bench = Bench(max_staleness=1, train_batch_size=2, max_buffered_batches=20)
        assert bench.begin(*NAMES[:6]) == ["ADMITTED"] * 4 + ["NO_ROOM"] * 2
        bench.submit(*group_rows("u0"), *group_rows("u1"))
        assert bench.begin("u4") == ["NO_ROOM"]
        bench.run.abort_groups(0, ["u3"], "")
        assert bench.begin("u4", "u5") == ["ADMITTED", "NO_ROOM"], "what is dropped does not count"

    def test_a_setting_of_its_own_and_none(self) -> None:
        assert fill(paced(0, max_batches_ahead=3)) == 4
        assert fill(paced(None, max_batches_ahead=0)) == 1
        assert fill(paced(None)) == 20, "max_buffered_batches"

    @pytest.mark.parametrize("is_new", [True, False])
    def test_a_trainer_that_resumes_at_a_high_version_gets_no_more(self, is_new: bool) -> None:
        bench = Bench(max_staleness=1, train_batch_size=2, n_samples_per_prompt=1, max_buffered_batches=20)
        if not is_new:
            bench.begin("u0")
        bench.run.announce(50)
        assert bench.begin(*NAMES).count("ADMITTED") == 4

    def test_versions_per_optimizer_step_allow_no_more(self) -> None:
        bench = Bench(max_staleness=1, train_batch_size=4, policy_mini_batch_size=1, max_buffered_batches=20)
        begun, version = fill(bench), 0
        for batch in range(5):
            assert begun == 4 * (batch + 2), "two batches ahead"
            for mini_batch in range(4):
                bench.run.acknowledge("policy", 0, Position(batch, 0, mini_batch), 0, commit=True)
                version += 1
                bench.run.announce(version)
            begun += fill(bench)

    @pytest.mark.parametrize("every", [3, 20, None])
    @pytest.mark.parametrize("max_staleness", [0, 4])
    def test_versions_that_come_with_every_third_batch_or_never_stop_nothing(
        self, every: int | None, max_staleness: int
    ) -> None:
        bench = paced(max_staleness)
        assert fill(bench) == max_staleness + 1
        for batch in range(21):
            ask(bench, batch)
            acknowledge(bench, batch)
            if every and batch % every == every - 1:
                bench.run.announce(batch + 1)
            ask(bench, batch + 1)
            assert fill(bench) == 1

    def test_failed_and_given_up_batches_do_not_count(self) -> None:
        bench = paced(build_batch=BuildBatch(fails={0}))
        assert fill(bench) == 1
        assert bench.state.failed
        assert fill(bench) == 1
        assert fill(bench) == 0
        bench.run.resume("policy", Checkpoint(Position(2), give_up_reason="lost"), "second")
        assert fill(bench) == 1

    def test_by_call_it_counts_batches(self) -> None:
        bench = Bench(seal_by="call", train_batch_size=8, max_buffered_batches=8, max_staleness=1)
        for batch in range(2):
            bench.submit(*group_rows(f"small-{batch}"))
            bench.run.seal(batch)
        with pytest.raises(ResourceExhaustedError, match="allows 2 untrained batches, and there are 2"):
            bench.submit(*group_rows("a"))
        bench.make_batches()
        acknowledge(bench, 0)
        bench.run.announce(1)
        assert bench.submit(*group_rows("a")) == ["ACCEPTED"] * 2


class TestRestarts:
    def test_what_ranks_asked_for_is_asked_again_after_the_service_restarts(self) -> None:
        bench = paced()
        fill(bench)
        acknowledge(bench, 0)
        ask(bench, 1)
        bench.reopen()
        assert fill(bench) == 0
        ask(bench, 1)
        assert fill(bench) == 1
        assert bench.replayed() == bench.state

    def test_announced_versions_are_in_the_log(self) -> None:
        bench = paced()
        fill(bench)
        acknowledge(bench, 0)
        bench.run.announce(1)
        bench.reopen()
        assert fill(bench) == 1

    def test_a_trainer_that_resumes_further_back_trains_batches_again(self) -> None:
        bench = paced(1)
        for batch in range(2):
            fill(bench)
            acknowledge(bench, batch, commit=False)
            bench.run.announce(batch + 1)
        assert fill(bench) == 1
        bench.run.resume("policy", Checkpoint(Position(1)), "second")
        assert fill(bench) == 0, "3 batches are not trained"
        ask(bench, 1)
        acknowledge(bench, 1, commit=False)
        assert fill(bench) == 0
        bench.run.announce(3)
        assert fill(bench) == 0, "2 batches are not trained"
        acknowledge(bench, 2, commit=False)
        ask(bench, 3)
        assert fill(bench) == 1

    def test_what_an_earlier_trainer_asked_for_does_not_count(self) -> None:
        bench = paced()
        fill(bench)
        ask(bench, 1)
        bench.run.resume("policy", Checkpoint(None), "second")
        acknowledge(bench, 0)
        assert fill(bench) == 0
        bench.run.begin("policy", [0])
        ask(bench, 1)
        assert fill(bench) == 1

    def test_an_earlier_trainer_that_asks_again_is_superseded_also_where_its_rank_is_gone(self) -> None:
        bench = paced(dp_size=2)
        first = bench.run.resume("policy", Checkpoint(None), "first").incarnation
        bench.run.batch(0, [1], "policy", first)
        bench.run.resume("policy", Checkpoint(None), "second", 1)
        for rank in range(2):
            with pytest.raises(StaleIncarnationError, match="the trainer was resumed elsewhere"):
                bench.run.batch(5, [rank], "policy", first)
        assert bench.run._writer.asked == {}

    def test_other_ranks_ask_again(self) -> None:
        bench = paced()
        fill(bench)
        ask(bench, 1)
        bench.run.resume("policy", Checkpoint(None), "second", 2)
        bench.make_batches()
        acknowledge(bench, 0)
        ask(bench, 1, 0)
        assert fill(bench) == 0
        ask(bench, 1, 1)
        assert fill(bench) == 1


class TestWaiting:
    @pytest.mark.parametrize("how", ["acknowledged", "announced", "asked", "shard asked", "resumed", "given up"])
    def test_what_makes_room_wakes_who_waits(self, how: str) -> None:
        bench = paced()
        fill(bench)
        if how == "acknowledged":
            ask(bench, 1)
        elif how != "given up":
            acknowledge(bench, 0, commit=False)
        woken = threading.Event()
        bench.run.wait(there_is_room(), woken.set)
        assert not woken.is_set()
        match how:
            case "acknowledged":
                acknowledge(bench, 0)
            case "announced":
                bench.run.announce(1)
            case "asked":
                ask(bench, 1)
            case "shard asked":
                bench.run.shard("policy", 0, None, 0)
            case "resumed":
                bench.run.resume("policy", Checkpoint(Position(1)), "second")
                assert not woken.is_set()
                ask(bench, 1)
            case _:
                bench.run.resume("policy", Checkpoint(Position(1), give_up_reason="lost"), "second")
        assert woken.is_set()

    def test_reasons_name_the_setting_its_use_and_who_has_to_do_what(self) -> None:
        bench = Bench(max_staleness=1, train_batch_size=2, policy_mini_batch_size=2, max_buffered_batches=9, dp_size=2)
        bench.begin(*NAMES[:4])
        limit = "max_staleness: 1 allows 4 untrained groups: "
        assert refusal(bench) == (
            f"{limit}4 are open, and 0 in sealed batches; complete or abort open groups, or raise max_batches_ahead"
        )
        bench.submit(*group_rows("u0"), *group_rows("u1"))
        bench.make_batches()
        assert refusal(bench) == (
            f"{limit}2 are open, and 2 in sealed batches; wait until policy ranks 0, 1 have acknowledged batch 0, or "
            "raise max_batches_ahead"
        )
        bench.run.acknowledge("policy", 0, Position(0), 0, commit=True)
        assert "wait until policy rank 1 has acknowledged batch 0" in refusal(bench)
        bench.run.acknowledge("policy", 1, Position(0), 0, commit=True)
        ask(bench, 1, 1)
        assert (
            "batch 0 is acknowledged, and counts as trained when a policy version is announced, or policy rank 0 has "
            "asked for a later batch; wait for either, or raise max_batches_ahead"
        ) in refusal(bench)

    def test_health_says_what_a_run_waits_for(self) -> None:
        bench = paced(0, max_batches_ahead=0)
        fill(bench)
        acknowledge(bench, 0)
        bench.let_pass(100.0)
        found = health(bench.run).findings[0]
        assert found.level == "stuck"
        assert "max_batches_ahead: 0 allows 1 untrained group: " in found.text
        assert "when a policy version is announced, or policy rank 0 has asked for a later batch" in found.text
