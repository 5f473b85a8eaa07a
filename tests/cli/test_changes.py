"""The changes of a run between two statuses of it."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill.v1 import run_pb2
from gristmill_service.cli.watch.tail import Change, changes, sentence

POLICY = run_pb2.MODEL_POLICY


def status(
    *, ranks: tuple[int, ...] = (), committed: int = 0, incarnation: int = 1, **fields: Any
) -> run_pb2.RunStatus:
    """ranks: the batch that each has to acknowledge next."""
    return run_pb2.RunStatus(
        run="run",
        ranks=[
            run_pb2.RankProgress(model=POLICY, rank=rank, next=run_pb2.Position(batch=batch))
            for rank, batch in enumerate(ranks)
        ],
        models=[
            run_pb2.ModelProgress(model=POLICY, committed=run_pb2.Position(batch=committed), incarnation=incarnation)
        ],
        **fields,
    )


def between(before: run_pb2.RunStatus, after: run_pb2.RunStatus) -> list[Change]:
    return list(changes(before, after, lambda: ()))


def test_nothing_is_said_of_what_is_as_it_was() -> None:
    same = status(ranks=(1, 1), batches_sealed=2, batches_published=1, groups_dropped={"stale": 3})
    assert between(same, same) == []


def test_what_leads_to_the_next_comes_first() -> None:
    after = status(ranks=(1, 1), committed=1, batches_sealed=1, batches_published=1, batches_freed=1, finished=True)
    events = [one["event"] for one in between(status(ranks=(0, 0)), after)]
    assert events == ["sealed", "published", "acknowledged", "committed", "freed", "finished"]


def test_ranks_that_are_at_the_same_place_are_reported_together() -> None:
    [first, last] = between(status(ranks=(0,) * 6), status(ranks=(1, 1, 2, 1, 0, 1)))
    assert (first["ranks"], last["ranks"]) == ([0, 1, 3, 5], [2])
    assert sentence(first) == "acknowledged by policy rank 0-1,3,5; next is batch 1 mini-batch 0"


def test_a_failed_batch_is_not_published() -> None:
    after = status(batches_sealed=2, batches_published=2, failed_batches={0: "no"})
    events = [(one["event"], one["batch"]) for one in between(status(batches_sealed=2), after)]
    assert events == [("failed", 0), ("published", 1)]
    assert sentence(between(status(batches_sealed=2), after)[0]) == "batch 0 failed: no"


def test_a_batch_that_fails_again_for_other_ranks_is_reported_again() -> None:
    before, after = (
        status(batches_sealed=1, batches_published=1, failed_batches={0: reason}) for reason in ("two", "three")
    )
    assert between(before, after) == [{"event": "failed", "batch": 0, "reason": "three"}]


def test_a_trainer_that_comes_back_resumes_and_acknowledges_nothing() -> None:
    [resumed] = between(status(ranks=(2, 2)), status(ranks=(1, 1), incarnation=2))
    assert (resumed["event"], resumed["incarnation"], resumed["position"]["batch"]) == ("resumed", 2, 1)
    assert sentence(resumed) == "policy resumed at batch 1 mini-batch 0"


def test_batches_that_a_restart_rebuilds_are_reported_and_published_again() -> None:
    whole, restarted = (status(batches_sealed=3, batches_published=count, batches_freed=1) for count in (3, 1))
    assert [(one["event"], one["batch"]) for one in between(whole, restarted)] == [("rebuilt", 1), ("rebuilt", 2)]
    assert [(one["event"], one["batch"]) for one in between(restarted, whole)] == [("published", 1), ("published", 2)]


def test_a_run_of_the_same_name_that_was_recreated_is_reported_from_its_beginning() -> None:
    before = status(batches_sealed=9, batches_published=9, rows_accepted=900)
    events = between(before, status(batches_sealed=1, rows_accepted=4))
    assert [one["event"] for one in events][:2] == ["recreated", "sealed"]


@pytest.mark.parametrize("is_reached", [True, False])
def test_drops_are_reported_even_where_their_names_are_not_to_be_had(is_reached: bool) -> None:
    groups = [
        run_pb2.GroupStatus(uid=uid, state=run_pb2.GROUP_STATE_DROPPED, reason="stale") for uid in ("old", "a", "b")
    ]
    before, after = status(groups_dropped={"stale": 1}), status(groups_dropped={"stale": 3})
    [dropped] = changes(before, after, lambda: groups if is_reached else ())
    assert (dropped["reason"], dropped["count"]) == ("stale", 2)
    assert [group["uid"] for group in dropped["groups"]] == (["a", "b"] if is_reached else [])
    assert sentence(dropped).startswith("2 groups dropped (stale): " + ("a, b" if is_reached else ""))


def test_a_run_that_gets_stuck_and_goes_on_again_is_reported() -> None:
    well = status(health=run_pb2.RunHealth(state="training", summary="2 batches not committed"))
    stuck = status(health=run_pb2.RunHealth(state="stuck", summary="rank 1 did not"))
    [event] = between(well, stuck)
    assert (event, sentence(event)) == ({"event": "stuck", "reason": "rank 1 did not"}, "stuck: rank 1 did not")
    assert between(stuck, stuck) == []
    assert [sentence(one) for one in between(stuck, well)] == ["unstuck: training: 2 batches not committed"]
