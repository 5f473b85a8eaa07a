"""The outbox by itself: whatever the service answers, no row is lost, doubled, or overtakes one of its trajectory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill._client.connection.failures import Failure
from gristmill._client.rollout.delivery import Delivery, PendingRow, RowOutcome, row_sizes, tables_of
from gristmill._client.rollout.outbox import Limits, Outbox
from gristmill._wire.rows import from_rows
from gristmill._wire.steps import Steps, concat
from gristmill.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    TooLargeError,
    UnavailableError,
)

LIMITS = Limits(message_rows=3, message_bytes=2000, linger_s=0.01)


def table(uid: str, step: int = 0, sample: int = 0, tokens: int = 3, **more: Any) -> Steps:
    row = {"uid": uid, "sample": sample, "step": step, "is_last_step": False, "prompt_token_ids": [1], "reward": 0.0}
    response = list(range(tokens))
    return from_rows([{**row, "response_ids": response, "loss_mask": [1] * tokens, **more}])


def names(entries: Sequence[PendingRow]) -> list[tuple[str, int]]:
    return [(entry.key.uid, int(entry.table.steps[entry.row])) for entry in entries]


def kept(entries: Sequence[PendingRow]) -> list[RowOutcome]:
    return [RowOutcome.ACCEPTED] * len(entries)


def filled(*tables: Steps, limits: Limits = LIMITS, timeout_s: float = 10.0) -> tuple[Outbox, Delivery]:
    outbox, delivery = Outbox(limits, timeout_s), Delivery()
    for rows in tables:
        outbox.add(rows, delivery, 0.0)
    return outbox, delivery


def test_a_row_waits_for_others_as_long_as_the_linger() -> None:
    outbox, _ = filled(table("a"))
    assert outbox.next_message(0.005) == []
    assert outbox.due_in(0.004) == pytest.approx(0.006)
    assert names(outbox.next_message(0.01)) == [("a", 0)]


def test_a_full_message_and_a_flush_do_not_wait() -> None:
    outbox, _ = filled(table("a"), table("b"), table("c"), table("d"))
    assert names(outbox.next_message(0.0)) == [("a", 0), ("b", 0), ("c", 0)]
    assert outbox.next_message(0.0) == []
    outbox.flush()
    assert names(outbox.next_message(0.0)) == [("d", 0)]


def test_a_message_stays_within_its_bytes_unless_one_row_is_more() -> None:
    outbox, _ = filled(table("a", tokens=300), table("b", tokens=100), table("c", tokens=1000), table("d"))
    outbox.flush()
    sizes = []
    while entries := outbox.next_message(0.0):
        sizes.append(names(entries))
        outbox.on_outcomes(entries, kept(entries), 0.0)
    assert sizes == [[("a", 0)], [("b", 0)], [("c", 0)], [("d", 0)]]


def test_a_table_that_fits_the_next_message_is_not_sent_in_parts() -> None:
    limits = Limits(10, 4_500, 0.0)
    large = concat([table(f"b{row}", tokens=200) for row in range(3)])
    outbox, _ = filled(table("a", tokens=300), large, table("c"), limits=limits)
    outbox.flush()
    assert [names(outbox.next_message(0.0)) for _ in range(2)] == [
        [("a", 0)],
        [("b0", 0), ("b1", 0), ("b2", 0), ("c", 0)],
    ]


def test_a_row_that_no_message_can_hold_is_refused_by_name() -> None:
    tokens = np.zeros(17 << 20, np.int32)
    row = {"uid": "a", "sample": 2, "prompt_token_ids": [1], "response_ids": tokens, "reward": 0.0}
    big = from_rows([row | {"loss_mask": np.ones(len(tokens), np.uint8)}], step_wise=False)
    outbox = Outbox(LIMITS, 10.0)
    with pytest.raises(
        InvalidArgumentError, match=r"uid 'a' sample 2 step 0: the row has \d+ bytes, and the limit of a message is"
    ):
        outbox.add(big, Delivery(), 0.0)
    assert outbox.due_in(0.0) is None


def test_rows_of_different_form_do_not_share_a_message() -> None:
    outbox, _ = filled(table("a"), table("b", rollout_logprobs=[-1.0] * 3), table("c"))
    outbox.flush()
    assert [names(outbox.next_message(0.0)) for _ in range(3)] == [[("a", 0)], [("b", 0)], [("c", 0)]]


def test_what_follows_a_refused_row_in_its_trajectory_is_not_sent() -> None:
    limits = Limits(1, 10_000, 0.0)
    outbox, delivery = filled(table("a", 0), table("b", 0), table("a", 1), limits=limits)
    refusal = Failure(AlreadyExistsError("uid 'a' sample 0 step 0: other content"))
    outbox.on_outcomes(outbox.next_message(0.0), [refusal], 0.0)
    assert names(outbox.next_message(0.0)) == [("b", 0)]
    assert outbox.next_message(0.0) == []
    assert delivery.pending == 1
    assert isinstance(outbox.take_error(delivery), AlreadyExistsError)
    assert outbox.take_errors() is None


def test_an_error_of_the_whole_run_is_not_searched_for_a_culprit() -> None:
    outbox, delivery = filled(table("a"), table("b"), table("c"))
    outbox.on_failure(outbox.next_message(0.0), Failure(NotFoundError("no such run")), 0.0)
    assert delivery.pending == 0
    assert len(delivery.failures) == 3


def test_while_the_service_is_away_nothing_is_sent_and_nothing_overtakes() -> None:
    outbox, _ = filled(table("a", 0), table("a", 1), table("a", 2), table("a", 3))
    outbox.on_failure(outbox.next_message(0.0), Failure(UnavailableError("away"), True, 2.0), 0.0)
    assert outbox.next_message(1.9) == []
    due_s = outbox.due_in(0.0)
    assert due_s is not None
    assert due_s >= 2.0
    assert names(outbox.next_message(10.0)) == [("a", 0), ("a", 1), ("a", 2)]


def test_a_last_attempt_that_is_cut_short_says_what_was_answered_before() -> None:
    outbox, delivery = filled(table("a"), timeout_s=5.0)
    outbox.on_failure(outbox.next_message(1.0), Failure(ResourceExhaustedError("it is full"), True, 9.0), 1.0)
    outbox.on_failure(outbox.next_message(6.0), Failure(DeadlineExceededError("no answer"), True), 6.0)
    assert "it is full (gave up after 5 s)" in str(outbox.take_error(delivery))


def test_a_trajectory_that_waits_for_an_answer_holds_back_its_own_rows_and_no_others() -> None:
    limits = Limits(1, 10_000, 0.0)
    outbox, _ = filled(table("a", 0), table("a", 1), table("a", 2), table("b", 0), table("b", 1), limits=limits)
    first, other = outbox.next_message(0.0), outbox.next_message(0.0)
    assert names(first) == [("a", 0)]
    assert names(other) == [("b", 0)]
    assert outbox.next_message(0.0) == []
    assert outbox.due_in(0.0) is None
    outbox.on_outcomes(other, kept(other), 0.0)
    assert names(outbox.next_message(0.0)) == [("b", 1)]
    outbox.on_outcomes(first, kept(first), 0.0)
    assert names(outbox.next_message(0.0)) == [("a", 1)]


def test_a_withdrawn_row_is_dropped_and_what_waited_with_it_goes_on() -> None:
    outbox, delivery = filled(table("a", sample=0), table("a", sample=1), table("b"))
    outbox.on_failure(outbox.next_message(0.0), Failure(UnavailableError("away"), True), 0.0)
    outbox.withdraw(lambda row: row.key.sample == 1)
    assert delivery.outcomes == [None, RowOutcome.DROPPED, None]
    assert names(outbox.next_message(9.0)) == [("a", 0), ("b", 0)]


def test_one_error_tells_of_many_trajectories() -> None:
    outbox, _ = filled(*(table(uid) for uid in "abcde"), limits=Limits(9, 10_000, 0.0))
    outbox.on_failure(outbox.next_message(0.0), Failure(NotFoundError("no such run")), 0.0)
    error = outbox.take_errors()
    assert isinstance(error, NotFoundError)
    assert str(error) == (
        "rows were not accepted: uid 'a' sample 0; uid 'b' sample 0; uid 'c' sample 0; and 2 more trajectories: "
        "no such run"
    )


def test_sizes_count_every_column() -> None:
    plain, rich = table("a"), table("a", rollout_logprobs=[-1.0] * 3)
    assert row_sizes(rich) - row_sizes(plain) == 12


class ScriptedService:
    """Answers each attempt as drawn, by row; keeps rows as the contract says, and checks order as it goes."""

    def __init__(self, draw: Callable[..., Any], bad: set[tuple[str, int]], full: set[str]) -> None:
        self.draw, self.bad, self.full = draw, bad, full
        self.kept: dict[tuple[str, int, int], int] = {}

    def attempt(self, outbox: Outbox, entries: list[PendingRow], now: float) -> None:
        joined = concat(tables_of(entries))
        rows = [(joined.uids[row], int(joined.samples[row]), int(joined.steps[row])) for row in range(len(joined))]
        assert rows == [(e.key.uid, e.key.sample, int(e.table.steps[e.row])) for e in entries]
        fault = self.draw(st.sampled_from(["none", "none", "lost", "away", "small"]))
        if fault == "away":
            outbox.on_failure(entries, Failure(UnavailableError("away"), True), now)
        elif fault == "small" and len(rows) > 1:
            outbox.on_failure(entries, Failure(TooLargeError("too large")), now)
        else:
            full = {uid for uid in sorted(self.full) if self.draw(st.booleans())}
            outcomes = [self.answer(row, full) for row in rows]
            if fault == "lost":
                outbox.on_failure(entries, Failure(UnavailableError("reply lost"), True), now)
            else:
                outbox.on_outcomes(entries, outcomes, now)

    def answer(self, row: tuple[str, int, int], full: set[str]) -> RowOutcome | Failure:
        if row[:2] in self.bad:
            return Failure(InvalidArgumentError("bad"))
        return Failure(ResourceExhaustedError("full"), True) if row[0] in full else self.keep(row)

    def keep(self, row: tuple[str, int, int]) -> RowOutcome:
        if row in self.kept:
            return RowOutcome.DUPLICATE
        uid, sample, step = row
        assert step == 0 or (uid, sample, step - 1) in self.kept, "a row overtook one of its trajectory"
        self.kept[row] = len(self.kept)
        return RowOutcome.ACCEPTED


@settings(deadline=None)
@given(st.data())
def test_every_row_ends_kept_once_or_told_as_failed(data: st.DataObject) -> None:
    draw = data.draw
    uids = st.sampled_from(["a", "b", "c", "d"])
    bad = draw(st.sets(st.tuples(uids, st.integers(0, 1)), max_size=2))
    service = ScriptedService(draw, bad, draw(st.sets(uids, max_size=2)))
    limits = Limits(draw(st.integers(1, 4)), draw(st.integers(1, 400)), 0.01)
    outbox, now = Outbox(limits, 1e9), 0.0
    deliveries: dict[tuple[str, int], Delivery] = {}
    steps: dict[tuple[str, int], int] = {}
    added = []
    for key in draw(st.lists(st.tuples(uids, st.integers(0, 1)), max_size=12)):
        delivery = deliveries.setdefault(key, Delivery())
        row = table(key[0], steps.get(key, 0), key[1], draw(st.integers(1, 40)))
        if not delivery.failures and outbox.has_room(row):
            outbox.add(row, delivery, now)
            added.append((*key, steps.get(key, 0)))
            steps[key] = steps.get(key, 0) + 1
        if draw(st.booleans()) and (entries := outbox.next_message(now)):
            service.attempt(outbox, entries, now)
        now += 0.004
    outbox.flush()
    while (pause := outbox.due_in(now)) is not None:
        now += max(0.0, pause)
        service.attempt(outbox, outbox.next_message(now), now)
    assert all(not delivery.pending for delivery in deliveries.values())
    assert set(service.kept) == {row for row in added if row[:2] not in bad}
    for key, delivery in deliveries.items():
        assert [failed[1:] for failed in delivery.failures] == ([key] if key in bad and delivery.outcomes else [])
        assert delivery.failures or None not in delivery.outcomes


def test_rows_that_wait_for_room_keep_their_trajectorys_order() -> None:
    # A message is too large, and its first half finds no room: the rest of the group is parked with it.
    outbox, _ = filled(
        *(table("g", step, sample) for sample in range(2) for step in range(2)), limits=Limits(8, 10_000, 0.0)
    )
    outbox.on_failure(outbox.next_message(0.0), Failure(TooLargeError("too large")), 0.0)
    outbox.on_outcomes(outbox.next_message(0.0), [Failure(ResourceExhaustedError("full", 0.0), True, 0.0)] * 2, 0.0)
    sent = []
    while (pause := outbox.due_in(0.0)) is not None:
        entries = outbox.next_message(pause + 1e-9)
        sent += [(entry.key.sample, int(entry.table.steps[entry.row])) for entry in entries]
        outbox.on_outcomes(entries, kept(entries), 0.0)
    assert sent == [(0, 0), (0, 1), (1, 0), (1, 1)]


@settings(deadline=None)
@given(st.data())
def test_with_several_messages_under_way_no_row_is_lost_doubled_or_early(data: st.DataObject) -> None:
    """Answers come in any order; each row is accepted or reported as failed once, none before the row ahead of it."""
    draw = data.draw
    uids = st.sampled_from(["a", "b", "c"])
    bad = draw(st.sets(st.tuples(uids, st.integers(0, 1), st.integers(0, 2)), max_size=2))
    outbox, now = Outbox(Limits(draw(st.integers(1, 4)), draw(st.integers(1, 400)), 0.0), 1e9), 0.0
    delivery = Delivery()
    arrived: list[Any] = []
    under_way: list[list[PendingRow]] = []
    steps: dict[tuple[str, int], int] = {}
    for key in draw(st.lists(st.tuples(uids, st.integers(0, 1)), max_size=12)):
        outbox.add(table(key[0], steps.get(key, 0), key[1]), delivery, now)
        steps[key] = steps.get(key, 0) + 1
    outbox.flush()
    while (pause := outbox.due_in(now)) is not None or under_way:
        if pause is not None and ((len(under_way) < 3 and draw(st.booleans())) or not under_way):
            now += max(0.0, pause) + 1e-6
            if entries := outbox.next_message(now):
                under_way.append(entries)
            continue
        entries = under_way.pop(draw(st.integers(0, len(under_way) - 1)))
        rows = [(entry.key.uid, entry.key.sample, int(entry.table.steps[entry.row])) for entry in entries]
        fault = draw(st.sampled_from([None, None, UnavailableError("away"), ResourceExhaustedError("full", 0.0)]))
        if isinstance(fault, UnavailableError):
            outbox.on_failure(entries, Failure(fault, True, 0.0), now)
            continue
        full = draw(uids) if fault else ""
        lost: dict[tuple[str, int], Failure] = {}
        answers: list[RowOutcome | Failure] = []
        for row in rows:
            if row[0] == full:
                lost[row[:2]] = Failure(ResourceExhaustedError("full", 0.0), True, 0.0)
            elif row in bad:
                lost[row[:2]] = Failure(InvalidArgumentError("bad"))
            answers.append(lost.get(row[:2], RowOutcome.ACCEPTED))
            arrived += [row] if row[:2] not in lost else []
        outbox.on_outcomes(entries, answers, now)
    assert delivery.pending == 0
    for key, count in steps.items():
        first_bad = min((step for *own, step in bad if (own[0], own[1]) == key and step < count), default=count)
        assert [step for *own, step in arrived if (own[0], own[1]) == key] == list(range(first_bad))
