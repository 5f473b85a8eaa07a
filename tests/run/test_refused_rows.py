"""Rows that are refused alone: the others are taken as if each had come by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill._wire.codecs.row_codec import Sent
from gristmill._wire.column_spec import specs_of
from gristmill._wire.rows import from_rows
from gristmill._wire.steps import Steps
from gristmill.errors import GristmillError, InvalidArgumentError, PrefixUnknownError
from gristmill_service.access.quotas import Limits
from gristmill_service.api.row_requests import RowsCheck, RowsRequest
from gristmill_service.run.capacity import RowBudget
from gristmill_service.run.machine.answers import Outcome, Taken
from gristmill_service.run.machine.events import GroupKey
from gristmill_service.run.machine.state import State
from gristmill_service.storage.journal.run_store import JournalRunStore
from tests.pipeline.written import column
from tests.run.deltas import shortened
from tests.run.harness import Bench, key, row, table
from tests.run.test_recovery import Machine
from tests.strategies import LAW, Row

VERSIONS_BELOW_ALL = -2


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """Rows of which some are wrong by themselves, and some because of others."""
    return row(
        draw(st.sampled_from("abcd")),
        draw(st.sampled_from([0, 0, 0, 1, 3])),
        draw(st.integers(0, 2)),
        last=draw(st.booleans()),
        reward=draw(st.sampled_from([0.0, 0.0, None])),
        response=draw(st.sampled_from([(7,), (7, 8)])),
        attempt=draw(st.sampled_from([0, 0, 0, 1])),
        policy_version=draw(st.sampled_from([0, 0, 0, 0, VERSIONS_BELOW_ALL])),
        tag=draw(st.sampled_from(["", "", "x", "y"])),
        reward_components=draw(st.sampled_from([None, None, None, {"x": 1.0}])),
    )


def unchecked(*rows: Row) -> Steps:
    """The rows as a client that checks nothing would send them."""
    versions = [one["policy_version"] for one in rows]
    lasts = np.array([one["is_last_step"] for one in rows])
    good = table(*(one | {"policy_version": 0, "is_last_step": True} for one in rows))
    return replace(good, policy_versions=np.array(versions, np.int32), is_last_steps=lasts)


def check_of(run: Any, steps: Steps, prefixes: Any = None, *, by_row: bool = True) -> RowsCheck:
    return RowsCheck(
        lambda: RowsRequest.of(Sent(steps, prefixes), by_row), lambda sent: Sent(run.checked(sent), sent.prefixes)
    )


def submit(run: Any, steps: Steps, prefixes: Any = None, *, by_row: bool = True) -> Taken:
    """Submits as the APIs do."""
    check = check_of(run, steps, prefixes, by_row=by_row)
    try:
        good = check.whole()
    except GristmillError as error:
        good = check.good(error)  # type: ignore[arg-type]
    taken = Taken([]) if good.sent is None else run.submit(*good.sent, by_row=by_row)
    return good.answer(taken)


def answers(run: Any, rows: list[Row]) -> list[Any]:
    """The outcome of each row, or the class of its error if it is the first refused one of its attempt."""
    try:
        taken = submit(run, unchecked(*rows))
    except GristmillError as whole:
        taken = Taken([Outcome.REFUSED] * len(rows), dict.fromkeys(range(len(rows)), whole))
    found: list[Any] = list(taken.outcomes)
    lost = set()
    for index, error in taken.refused.items():
        if (attempt := attempt_of(rows[index])) not in lost:
            found[index] = type(error)
            lost.add(attempt)
    return found


def attempt_of(one: Row) -> Any:
    return one["uid"], one["sample"], one["attempt"]


def stored(state: State) -> Any:
    """All that rows change, except for where they are."""
    groups = {
        key: (group.tag, {sample: (one.attempt, _digests(one)) for sample, one in group.trajectories.items()})
        for key, group in state.open.items()
    }
    return groups, state.schema, state.tags, state.rows_accepted, state.row_bytes


def _digests(trajectory: Any) -> dict[int, bytes]:
    return {step: one.digest for step, one in trajectory.rows.items()}


@LAW
@given(
    st.lists(rows(), min_size=1, max_size=8),
    st.sampled_from([None, {"reward": [1.0]}, {"reward": 1.0, "rollout_logprobs": [-1.0]}]),
    st.sampled_from([None, 3]),
)
def test_the_same_rows_are_taken_as_if_each_were_sent_alone_in_order(
    sent: list[Row], first: Row | None, most_rows: int | None
) -> None:
    """Except for those that follow a refused row in its trajectory and attempt, which are not sent then."""
    together, alone = (
        Bench(
            budget=RowBudget(1 << 30, Limits(None, most_rows, None)),
            n_samples_per_prompt=3,
            max_buffered_batches=1,
        )
        for _ in range(2)
    )
    if most_rows is not None:
        # A higher attempt gives the limit rows back, which another request may take and its own may not.
        sent = [one | {"attempt": 0} for one in sent]
    expected: list[Any] = []
    lost = set()
    for bench in (together, alone):
        if first is not None:
            bench.submit(row("z") | first)
    for one in sent:
        if attempt_of(one) in lost:
            expected.append(Outcome.REFUSED)
            continue
        try:
            expected += submit(alone.run, unchecked(one), by_row=False).outcomes
        except GristmillError as error:
            lost.add(attempt_of(one))
            expected.append(type(error))
    assert answers(together.run, sent) == expected
    assert stored(together.state) == stored(alone.state)
    if not any(one["attempt"] for one in sent):
        repeated = [Outcome.DUPLICATE if one is Outcome.ACCEPTED else one for one in expected]
        assert answers(together.run, sent) == repeated


def test_what_builds_upon_a_refused_row_is_refused_with_it_and_what_builds_upon_others_is_not() -> None:
    bench = Bench()
    steps = [row("a", 0, 0, last=False), row("a", 0, 1, last=False, prompt_token_ids=[1, 2, 7, 8])]
    bench.submit(row("b"), row("a", 1, 0, last=False, response=(9,)))
    conflict = row("a", 1, 0, last=False, response=(5,))
    after = row("a", 1, 1, prompt_token_ids=[1, 2, 5, 8])
    taken = submit(bench.run, *shortened(table(*steps, conflict, after, row("b")), [0, 2, 0, 2, 0]))
    assert [outcome.name for outcome in taken.outcomes] == ["ACCEPTED", "ACCEPTED", "REFUSED", "REFUSED", "DUPLICATE"]
    assert list(taken.refused) == [2, 3]
    assert "uid 'a' sample 1 step 0: different content" in str(taken.refused[2]) == str(taken.refused[3])
    assert list(bench.state.open[GroupKey(0, "a")].trajectories[1].rows) == [0]
    with pytest.raises(PrefixUnknownError):
        submit(bench.run, *shortened(table(row("c", step=4, prompt_token_ids=[1, 2, 3])), [2]))


def test_only_rows_with_a_column_that_is_not_declared_or_of_another_dtype_are_refused() -> None:
    bench = Bench(columns=[column("score", "rollout", dtype="int32", required=False)])
    declared = [column("score", "rollout", dtype="int32", required=False), column("other", "rollout", required=False)]
    rows = [row("a"), row("a", 1, other=[1.0]), row("b", score=[1])]
    taken = submit(bench.run, from_rows(rows, columns=specs_of(declared)))
    assert [outcome.name for outcome in taken.outcomes] == ["ACCEPTED", "REFUSED", "ACCEPTED"]
    assert "uid 'a' sample 1 step 0: column 'other' is not declared" in str(taken.refused[1])


def test_the_first_step_of_an_aborted_attempt_is_refused_and_a_later_one_is_told_to_stop() -> None:
    bench = Bench(n_samples_per_prompt=3)
    bench.submit(row("a", last=False), row("b"))
    bench.run.abort_trajectories([key("a"), key("b", 1)], "the engine raised", 1)
    late = [row("a", 0, 1), row("b", 1), row("b", 1, 1, attempt=1), row("b", 1, attempt=1)]
    taken = submit(bench.run, table(*late))
    assert [outcome.name for outcome in taken.outcomes] == ["DROPPED", "REFUSED", "DROPPED", "REFUSED"]
    assert [str(error) for error in taken.refused.values()] == [
        "uid 'b' sample 1 step 0: attempt 1 was aborted (the engine raised), and this is attempt "
        f"{attempt}; sample the trajectory again with a higher attempt"
        for attempt in (0, 1)
    ]
    assert submit(bench.run, table(*late), by_row=False).outcomes == [Outcome.DROPPED] * 4
    assert submit(bench.run, table(row("b", 1, attempt=2))).outcomes == [Outcome.ACCEPTED]


def test_after_a_kill_exactly_the_accepted_rows_are_there(tmp_path: Path) -> None:
    one = Machine(tmp_path)
    assert isinstance(one.ledger, JournalRunStore)
    sent = [row("a"), row("a", 7), row("b", policy_version=VERSIONS_BELOW_ALL), row("b", 1)]
    sent = [{"policy_version": 0, "attempt": 0} | each for each in sent]
    before = answers(one.run, sent)
    one.die()
    again = submit(one.run, unchecked(*sent))
    assert [outcome.name for outcome in again.outcomes] == ["DUPLICATE", "REFUSED", "REFUSED", "DUPLICATE"]
    assert [type(error) for error in again.refused.values()] == before[1:3]
    assert one.run.status().rows_accepted == 2
    one.ledger.close()


def test_errors_of_rows_reference_no_frames() -> None:
    """Cycles of thousands of errors and frames would be collected at once, while every other call waits."""
    check = check_of(Bench().run, unchecked(*(row(uid, policy_version=VERSIONS_BELOW_ALL) for uid in "abcd")))
    with pytest.raises(InvalidArgumentError) as caught:
        check.whole()
    errors = check.good(caught.value).refused.values()
    assert [(error.__traceback__, error.__context__) for error in errors] == [(None, None)] * 4
