"""How producers are paced."""

from __future__ import annotations

import pytest

from gristmill.errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError
from gristmill_service.run.capacity import RowBudget
from gristmill_service.run.machine.answers import Position
from gristmill_service.run.machine.decisions.admission import with_overdraft
from gristmill_service.run.machine.described_rows import ROW_OVERHEAD_BYTES
from tests.run.harness import Bench, group_rows, key, row

NAMES = list("abcdefghij")


def train(bench: Bench, batch: int) -> None:
    """One rank trains on a whole batch and commits it."""
    for mini_batch in range(len(bench.uids(batch))):
        bench.run.acknowledge("policy", 0, Position(batch, 0, mini_batch), 0, commit=True)


def test_groups_are_admitted_in_their_order_as_far_as_there_is_room() -> None:
    bench = Bench(max_buffered_batches=2)
    assert bench.begin(*NAMES[:6]) == ["ADMITTED"] * 4 + ["NO_ROOM"] * 2
    answer = bench.run.begin_groups(0, ["e"])
    assert answer.retry_after_s > 0
    assert "max_buffered_batches: 2 batches of train_batch_size: 2 are stored" in answer.reason


def test_asking_again_gives_the_same_answer_and_takes_no_more_room() -> None:
    bench = Bench(max_buffered_batches=1)
    for _ in range(3):
        assert bench.begin("a", "a", "b", "c") == ["ADMITTED", "ADMITTED", "ADMITTED", "NO_ROOM"]


def test_sealed_and_dropped_groups_are_answered_as_what_they_are_also_after_the_end() -> None:
    bench = Bench(train_batch_size=1)
    bench.submit(*group_rows("a"))
    bench.begin("b")
    bench.run.abort_groups(0, ["b"], "")
    assert bench.begin("a", "b") == ["SEALED", "DROPPED"]
    bench.run.finish()
    assert bench.begin("a", "b") == ["SEALED", "DROPPED"]
    with pytest.raises(FailedPreconditionError, match="finished"):
        bench.begin("a", "c")
    assert bench.run.status().groups_room == 0


def test_room_comes_back_with_what_is_dropped_and_with_what_is_freed() -> None:
    bench = Bench(train_batch_size=1, max_buffered_batches=1)
    bench.begin("a")
    assert bench.begin("b") == ["NO_ROOM"]
    bench.run.abort_groups(0, ["a"], "")
    assert bench.begin("b") == ["ADMITTED"]
    bench.submit(*group_rows("b"))
    assert bench.begin("c") == ["NO_ROOM"], "sealed, not freed"
    bench.make_batches()
    assert bench.begin("c") == ["NO_ROOM"]
    train(bench, 0)
    assert bench.begin("c") == ["ADMITTED"]


def test_a_failed_batch_gives_its_room_back_so_that_the_run_goes_on() -> None:
    bench = Bench(max_staleness=0, train_batch_size=1, max_buffered_batches=1)
    bench.build_batch._fails = {0}
    bench.submit(*group_rows("a"))
    assert bench.begin("b") == ["NO_ROOM"]
    bench.make_batches()
    assert bench.begin("b") == ["ADMITTED"]


ROW_BYTES = ROW_OVERHEAD_BYTES + 4 * 3 + 1  # two prompt tokens, one response token, its mask


def test_groups_are_admitted_while_the_bytes_expected_of_them_fit() -> None:
    bench = Bench(max_buffered_batches=8, max_buffered_bytes=4 * 2 * ROW_BYTES)
    bench.submit(*group_rows("a"))  # what is expected of the others, too
    assert bench.begin("b", "c", "d", "e") == ["ADMITTED"] * 3 + ["NO_ROOM"]
    bench.run.abort_groups(0, ["d"], "")
    assert bench.begin("e") == ["ADMITTED"]


def test_row_bytes_and_shard_bytes_bound_admission_but_never_the_first_batch() -> None:
    bench = Bench(train_batch_size=2, max_buffered_batches=8, max_buffered_bytes=1)
    assert bench.begin("a", "b") == ["ADMITTED"] * 2, "else no batch could ever be filled"
    bench.submit(*group_rows("a"))
    answer = bench.run.begin_groups(0, ["c"])
    assert [admission.name for admission in answer.admissions] == ["NO_ROOM"]
    assert "of max_buffered_bytes: 1" in answer.reason
    bench.submit(*group_rows("b"))
    bench.make_batches()
    assert bench.state.row_bytes > 0, "they stay until the batch is freed: it may have to be cut again"
    assert bench.state.shard_bytes > 0
    assert bench.begin("c") == ["NO_ROOM"], "a batch is held that can be freed"
    train(bench, 0)
    assert (bench.state.row_bytes, bench.state.shard_bytes) == (0, 0)
    assert bench.begin("c", "d", "e") == ["ADMITTED", "ADMITTED", "NO_ROOM"]


def test_an_admitted_group_is_not_refused_for_want_of_room_that_batches_under_way_need() -> None:
    bench = Bench(train_batch_size=2, max_buffered_bytes=1)
    bench.begin("a", "b")
    for uid in "ab":
        for sample in range(2):
            assert bench.submit(row(uid, sample, reward=float(sample), response=range(500))) == ["ACCEPTED"]


def test_the_rows_of_all_runs_share_the_services_bound() -> None:
    budget = RowBudget(4 * 2 * ROW_BYTES)
    one = Bench(budget=budget, name="one", max_buffered_batches=8)
    other = Bench(budget=budget, name="other", max_buffered_batches=8)
    for bench in (one, other):
        bench.submit(*group_rows("a"))
        bench.submit(row("b"))
    # Each run holds three rows, and expects one more group's worth of its open group.
    answer = one.run.begin_groups(0, ["c"])
    assert [admission.name for admission in answer.admissions] == ["NO_ROOM"]
    assert "raise the service's max_row_bytes" in answer.reason
    other.run.abort_groups(0, ["a", "b"], "")
    assert one.begin("c") == ["ADMITTED"]


def test_rows_of_an_admitted_group_wait_where_they_pass_the_runs_limit_by_a_quarter() -> None:
    bench = Bench(max_buffered_bytes=4 << 20)
    bench.begin("a")
    million = range(1 << 18)
    took = [bench.submit(row("a", step=step, last=False, response=million)) for step in range(4)]
    assert took == [["ACCEPTED"]] * 4
    with pytest.raises(ResourceExhaustedError, match="max_buffered_bytes: 4194304 by at most a quarter"):
        bench.submit(row("a", step=4, last=False, response=million))
    assert bench.state.row_bytes <= with_overdraft(4 << 20)
    assert bench.submit(row("a", step=4, response=range(1 << 16))) == ["ACCEPTED"], (
        "nothing of what was refused is kept"
    )
    bench.run.abort_groups(0, ["a"], "")
    assert bench.state.row_bytes == 0


def test_one_runs_rows_never_take_the_room_that_anothers_groups_were_promised() -> None:
    budget = RowBudget(4 << 20)
    one, other = (Bench(budget=budget, name=name, train_batch_size=4) for name in ("one", "other"))
    quarter = range((1 << 18) - 1000)
    other.submit(*(row("a", sample, response=range(1 << 15), reward=float(sample)) for sample in range(2)))
    other.begin("b", "c")
    one.begin("a")
    for step in range(4):
        one.submit(row("a", step=step, last=False, response=quarter))
    with pytest.raises(ResourceExhaustedError, match="the service's other runs leave"):
        one.submit(row("a", step=4, last=False, response=quarter))
    for uid in "bc":
        for sample in range(2):
            assert other.submit(row(uid, sample, response=range(1 << 15), reward=0.5)) == ["ACCEPTED"]
    assert one.state.row_bytes + other.state.row_bytes <= with_overdraft(4 << 20)


def test_a_run_that_takes_all_it_gets_leaves_a_fifth_to_the_next() -> None:
    budget = RowBudget(10 * 2 * ROW_BYTES)
    greedy, next_ = (
        Bench(budget=budget, name=name, max_buffered_batches=9, train_batch_size=1) for name in ("greedy", "next")
    )
    for uid in NAMES:
        if greedy.begin(uid) == ["ADMITTED"]:
            greedy.submit(*group_rows(uid))
    assert greedy.state.row_bytes == 8 * 2 * ROW_BYTES
    assert next_.begin("a") == ["ADMITTED"]
    alone = Bench(budget=RowBudget(10 * 2 * ROW_BYTES), max_buffered_batches=20, train_batch_size=1)
    assert [alone.submit(*group_rows(uid)) for uid in NAMES] == [["ACCEPTED"] * 2] * 10


def test_a_run_whose_group_grows_without_end_leaves_the_next_run_what_its_rows_need() -> None:
    """It took the quarter beyond the limit to the last byte, and turns of every other run waited for it."""
    budget = RowBudget(4 << 20)
    greedy, other = (Bench(budget=budget, name=name, train_batch_size=4) for name in ("greedy", "other"))
    other.submit(*(row("a", sample, response=range(1 << 10), reward=float(sample)) for sample in range(2)))
    greedy.begin("a")

    def grow() -> None:
        for step in range(100):
            greedy.submit(row("a", step=step, last=False, response=range((1 << 16) - 1000)))

    with pytest.raises(ResourceExhaustedError, match="the service's other runs leave"):
        grow()
    for uid in NAMES[1:]:
        assert other.begin(uid) == ["ADMITTED"]
        assert other.submit(row(uid, 0, response=range(1 << 10), reward=0.5)) == ["ACCEPTED"]


def test_a_round_below_zero_or_a_nameless_group_is_refused() -> None:
    bench = Bench()
    for round_, uids, message in (
        (-1, ["a"], "round -1 is negative; send 0 or more"),
        (0, ["a", ""], r"uids\[1\] is empty"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            bench.run.begin_groups(round_, uids)
    assert not bench.state.open


def test_a_group_of_which_all_is_aborted_gives_its_room_back() -> None:
    bench = Bench(train_batch_size=1, max_buffered_batches=1)
    bench.begin("a")
    bench.run.abort_trajectories([key("a", 0), key("a", 1)], "")
    assert bench.begin("b") == ["ADMITTED"]
