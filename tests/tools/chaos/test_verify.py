"""The campaign's proof can fail: each way to break the promise is seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gristmill import Group, GroupState
from gristmill._wire.addresses import Position
from tests.tools.chaos.__main__ import share
from tests.tools.chaos.campaign import Report, rollbacks_of
from tests.tools.chaos.contents import SAMPLES, Contents
from tests.tools.chaos.expected import expected_effects
from tests.tools.chaos.neighbours import wrong_rows
from tests.tools.chaos.rank_log import Effect, RankLog, Trained
from tests.tools.chaos.trainer import Launch, before
from tests.tools.chaos.verify import Failures, Rollback, Verdict, verify
from tests.tools.chaos.worker import WorkerLog

CONTENTS = Contents(5)
UIDS = [
    uid
    for uid in (f"w0-{index}" for index in range(40))
    if not any(CONTENTS.is_aborted(uid, sample) for sample in range(SAMPLES))
][:4]
LONG = next((uid, sample) for uid in UIDS for sample in range(SAMPLES) if CONTENTS.steps(uid, sample) > 1)


def worker_log() -> WorkerLog:
    log = WorkerLog(Path("unused"))
    for uid in UIDS:
        for sample in range(SAMPLES):
            log.attempts[uid, sample] = 0
            log.rows += [(uid, sample, row["step"], 0, "ACCEPTED") for row in CONTENTS.rows(uid, sample, 0)]
        log.done.add(uid)
    return log


def effects_of(uid: str, sample: int, attempt: int = 0) -> list[Effect]:
    return expected_effects(CONTENTS, uid, sample, attempt, 0)


def training() -> list[list[Trained]]:
    """Two ranks, a sample each; two batches of two groups, a mini-batch each group, two epochs."""
    return [
        [
            Trained(Position(batch, epoch, index), effects_of(UIDS[2 * batch + index], rank))
            for batch in range(2)
            for epoch in range(2)
            for index in range(2)
        ]
        for rank in range(2)
    ]


def groups() -> list[Group]:
    return [Group(uid, 0, GroupState.SEALED, index // 2, "") for index, uid in enumerate(UIDS)]


def judged(**changed: Any) -> Verdict:
    arguments: dict[str, Any] = {"logs": [worker_log()], "groups": groups(), "launches": [training()]} | changed
    return verify(CONTENTS, 2, **arguments)


def test_what_went_well_is_clean() -> None:
    verdict = judged()
    assert verdict.is_clean
    assert verdict.rows_acknowledged == sum(CONTENTS.steps(uid, sample) for uid in UIDS for sample in range(SAMPLES))


def test_the_trainers_restarts_are_one_training() -> None:
    first, second = training()
    assert judged(launches=[[first[:3], second[:3]], [first[3:], second[3:]]]).is_clean


def test_a_lost_row_is_seen() -> None:
    uid, sample = LONG
    ranks = training()
    at = next(i for i, step in enumerate(ranks[sample]) if step.effects[0].uid == uid)
    ranks[sample][at] = ranks[sample][at]._replace(effects=ranks[sample][at].effects[:-1])
    assert judged(launches=[ranks]).lost


def test_a_lost_trajectory_is_seen() -> None:
    ranks = training()
    ranks[0] = [step._replace(effects=()) if step.position == Position(1, 1, 0) else step for step in ranks[0]]
    assert judged(launches=[ranks]).lost == [f"{UIDS[2]} sample 0: accepted, and not trained in epoch 1"]


def test_a_row_that_is_trained_twice_is_seen() -> None:
    ranks = training()
    ranks[1][0] = ranks[1][0]._replace(effects=[*ranks[1][0].effects, ranks[0][0].effects[0]])
    assert judged(launches=[ranks]).trained_twice


@pytest.mark.parametrize(
    "change", [lambda steps: steps[:3] + steps[4:], lambda steps: [steps[1], steps[0], *steps[2:]]]
)
def test_a_position_that_is_missing_or_out_of_order_is_seen(change: Callable[[list[Trained]], list[Trained]]) -> None:
    assert judged(launches=[[change(steps) for steps in training()]]).out_of_order


def test_a_position_that_is_trained_again_is_seen() -> None:
    first, second = training()
    verdict = judged(launches=[[first[:4], second[:4]], [first[3:], second[3:]]])
    assert verdict.out_of_order
    assert verdict.trained_twice


def test_ranks_that_are_out_of_step_are_seen() -> None:
    first, second = training()
    assert judged(launches=[[first, second[:-1]]]).out_of_order


def test_tokens_that_nobody_sent_are_seen() -> None:
    ranks = training()
    wrong = ranks[0][0].effects[0]._replace(digest="0" * 16)
    ranks[0][0] = ranks[0][0]._replace(effects=[wrong, *ranks[0][0].effects[1:]])
    assert judged(launches=[ranks]).wrong


def test_a_trajectory_that_was_aborted_may_not_be_trained() -> None:
    uid, sample = next(
        (uid, sample)
        for uid in (f"w0-{index}" for index in range(500))
        for sample in range(SAMPLES)
        if CONTENTS.is_aborted(uid, sample) and not CONTENTS.is_aborted(uid, 1 - sample)
    )
    log = WorkerLog(Path("unused"), {(uid, 0): 0, (uid, 1): 0}, {uid})
    log.rows += [(uid, 1 - sample, row["step"], 0, "ACCEPTED") for row in CONTENTS.rows(uid, 1 - sample, 0)]
    arguments: dict[str, Any] = {"logs": [log], "groups": [Group(uid, 0, GroupState.SEALED, 0, "")]}
    trained = [Trained(Position(0, epoch, 0), effects_of(uid, 1 - sample)) for epoch in range(2)]
    assert judged(launches=[[trained]], **arguments).is_clean
    both = [step._replace(effects=[*step.effects, *effects_of(uid, sample)]) for step in trained]
    assert judged(launches=[[both]], **arguments).wrong


@pytest.mark.parametrize("change", [{"trained": 0}, {"reward": 7.0}])
def test_masks_and_rewards_that_nobody_sent_are_seen(change: dict[str, Any]) -> None:
    ranks = training()
    wrong = ranks[0][0].effects[0]._replace(**change)
    ranks[0][0] = ranks[0][0]._replace(effects=[wrong, *ranks[0][0].effects[1:]])
    assert judged(launches=[ranks]).wrong


def test_a_group_that_is_trained_in_another_batch_is_seen() -> None:
    assert judged(groups=[group._replace(batch=1 - (group.batch or 0)) for group in groups()]).wrong


def test_an_attempt_that_was_superseded_may_not_be_trained() -> None:
    log = worker_log()
    uid, sample = UIDS[0], 0
    log.attempts[uid, sample] = 1
    log.rows += [(uid, sample, row["step"], 1, "ACCEPTED") for row in CONTENTS.rows(uid, sample, 1)]
    assert judged(logs=[log]).wrong
    ranks = training()
    ranks[0] = [
        step._replace(effects=effects_of(uid, sample, 1)) if step.effects[0].uid == uid else step for step in ranks[0]
    ]
    assert judged(logs=[log], launches=[ranks]).is_clean


@pytest.mark.parametrize(
    ("state", "reason"),
    [(GroupState.DROPPED, "timeout"), (GroupState.DROPPED, ""), (GroupState.OPEN, ""), (GroupState.COMPLETE, "")],
)
def test_a_whole_group_that_is_not_in_a_batch_is_lost(state: GroupState, reason: str) -> None:
    contents = groups()
    contents[0] = Group(UIDS[0], 0, state, None, reason)
    ranks = [
        [step._replace(effects=[e for e in step.effects if e.uid != UIDS[0]]) for step in rank] for rank in training()
    ]
    assert judged(groups=contents, launches=[ranks]).lost


def test_a_group_that_the_service_has_forgotten_is_lost() -> None:
    assert judged(groups=groups()[1:]).lost


def test_what_was_dropped_may_not_be_trained() -> None:
    log = worker_log()
    log.done.discard(UIDS[0])
    contents = groups()
    contents[0] = Group(UIDS[0], 0, GroupState.DROPPED, None, "finished")
    assert judged(logs=[log], groups=contents).wrong


def test_a_rank_keeps_what_is_in_a_checkpoint_and_forgets_the_rest(tmp_path: Path) -> None:
    log = RankLog(tmp_path / "rank.sqlite")
    steps = training()[0]
    log.save(1, steps[2].position, 1, steps[:2])
    log.save(2, steps[3].position, 1, [steps[2]])
    assert log.checkpoints() == {1: steps[2].position, 2: steps[3].position}
    assert log.trained(1) == steps[:2]
    assert log.trained(2) == steps[:3]
    log.close()


# What a store that goes back in time takes with it.


def rolled_back(is_reported: bool = True) -> dict[str, Any]:
    """The first group's rows were acknowledged between the copy and the moment that the store served again."""
    log = worker_log()
    log.times = {uid: [100.0] for uid in UIDS} | {UIDS[0]: [200.0]}
    ranks = [
        [step._replace(effects=[e for e in step.effects if e.uid != UIDS[0]]) for step in rank] for rank in training()
    ]
    rollback = Rollback(since=199.0, until=201.0, is_reported=is_reported)
    return {"logs": [log], "groups": groups()[1:], "launches": [ranks], "rollbacks": [rollback]}


def test_what_was_lost_by_a_rollback_and_reported_is_counted_and_no_finding() -> None:
    verdict = judged(**rolled_back())
    assert verdict.is_clean
    assert len(verdict.rolled_back) == 1


def test_what_was_lost_by_a_rollback_that_nobody_reported_is_lost() -> None:
    assert judged(**rolled_back(is_reported=False)).lost


def test_a_rollback_excuses_only_what_happened_since_the_copy() -> None:
    arguments = rolled_back()
    [rollback] = arguments["rollbacks"]
    assert judged(**arguments | {"rollbacks": [replace(rollback, since=201.0, until=202.0)]}).lost


def test_a_rollback_excuses_nothing_that_is_trained_twice() -> None:
    arguments = rolled_back()
    ranks = training()
    ranks[1][0] = ranks[1][0]._replace(effects=[*ranks[1][0].effects, ranks[0][0].effects[0]])
    assert judged(**arguments | {"groups": groups(), "launches": [ranks]}).trained_twice


def test_after_a_rollback_an_earlier_attempt_may_be_the_last_that_is_left() -> None:
    arguments = rolled_back() | {"groups": groups(), "launches": [training()]}
    [log] = arguments["logs"]
    log.attempts[UIDS[0], 0] = 1
    log.rows += [(UIDS[0], 0, row["step"], 1, "ACCEPTED") for row in CONTENTS.rows(UIDS[0], 0, 1)]
    assert judged(**arguments).is_clean
    assert judged(**arguments | {"rollbacks": []}).wrong


def test_a_group_that_is_sealed_and_that_nobody_trains_is_skipped_though_its_rows_may_be_excused() -> None:
    verdict = judged(**rolled_back() | {"groups": groups()})
    assert [f"{UIDS[0]}: sealed into batch 0, and skipped in epoch {epoch}" for epoch in range(2)] == verdict.skipped


def test_a_rollback_is_reported_where_the_generation_grows_for_it_alone() -> None:
    rollbacks = rollbacks_of([(1.0, 2.0, 1), (3.0, 4.0, 2), (5.0, 6.0, 2)], generation=3)
    assert [rollback.is_reported for rollback in rollbacks] == [True, False, True]
    assert [(rollback.since, rollback.until) for rollback in rollbacks] == [(1.0, 2.0), (3.0, 4.0), (5.0, 6.0)]
    late = [(1.0, 2.0, 1), (3.0, 4.0, 1)]
    assert [rollback.is_reported for rollback in rollbacks_of(late, generation=3)] == [True, True]
    assert [rollback.is_reported for rollback in rollbacks_of(late, generation=2)] == [False, True]
    never = [(1.0, 2.0, 1), (3.0, 4.0, 1), (5.0, 6.0, 1)]
    assert [rollback.is_reported for rollback in rollbacks_of(never, generation=4)] == [False, True, True]
    assert rollbacks_of([], generation=1) == []


# Batches that fail because the store lost a part of what it held.


def failed(trained: int = 0, reason: str = "batch_failed", **changed: Any) -> dict[str, Any]:
    """The first batch has failed, when that many of its positions were trained, and the ranks have stepped over it."""
    contents = [group if group.batch else Group(group.uid, 0, GroupState.DROPPED, None, reason) for group in groups()]
    ranks = [[*steps[:trained], *(step for step in steps if step.position.batch)] for steps in training()]
    failures: dict[str, Any] = {"reported": {0: "rows of it are lost"}, "stepped_over": [0], "are_allowed": True}
    return {"groups": contents, "launches": [ranks], "failures": Failures(**failures | changed)}


@pytest.mark.parametrize("trained", [0, 1, 3, 4])
def test_rows_of_a_batch_that_failed_are_counted_as_lost_and_reported_where_that_is_allowed(trained: int) -> None:
    verdict = judged(**failed(trained))
    assert verdict.is_clean
    assert verdict.batches_failed == 1
    assert verdict.rows_reported_lost == sum(CONTENTS.steps(uid, sample) for uid in UIDS[:2] for sample in range(2))


@pytest.mark.parametrize("trained", [0, 3])
def test_a_batch_that_failed_is_a_finding_where_the_store_is_durable(trained: int) -> None:
    lost = judged(**failed(trained, are_allowed=False)).lost
    assert "batch 0: failed: rows of it are lost" in lost
    assert f"{UIDS[0]}: was handed over whole, and dropped: 'batch_failed'" in lost


def test_a_batch_that_failed_after_all_of_it_was_trained_is_a_finding_too_where_the_store_is_durable() -> None:
    assert judged(failures=Failures({0: "rows of it are lost"})).lost


def test_a_batch_that_the_ranks_step_over_and_that_nobody_says_has_failed_is_skipped() -> None:
    verdict = judged(**failed(reported={}) | {"groups": groups()})
    assert verdict.skipped[0] == "batch 0: the ranks stepped over it, and the service does not say that it failed"


def test_a_batch_that_failed_and_is_missing_from_the_ranks_record_is_out_of_order() -> None:
    assert judged(**failed(stepped_over=[])).out_of_order


def test_of_a_batch_that_failed_the_positions_that_were_trained_are_in_order() -> None:
    arguments = failed(3)
    [ranks] = arguments["launches"]
    assert judged(**arguments | {"launches": [[[steps[1], steps[0], *steps[2:]] for steps in ranks]]}).out_of_order


def test_a_batch_that_failed_excuses_nothing_of_the_others() -> None:
    arguments = failed()
    [ranks] = arguments["launches"]
    ranks[0] = [step._replace(effects=()) if step.position == Position(1, 1, 0) else step for step in ranks[0]]
    assert judged(**arguments).lost == [f"{UIDS[2]} sample 0: accepted, and not trained in epoch 1"]


def test_groups_of_a_batch_that_failed_are_trained_in_no_other_batch() -> None:
    verdict = judged(**failed() | {"launches": [training()]} | {"failures": Failures({5: ""}, [5], True)})
    assert verdict.wrong


def test_a_group_that_is_dropped_for_lost_rows_is_reported_where_that_is_allowed() -> None:
    arguments = failed(reason="rows_lost")
    assert judged(**arguments).is_clean
    assert judged(**arguments | {"failures": replace(arguments["failures"], are_allowed=False)}).lost


def test_a_rank_writes_down_with_its_checkpoint_what_it_stepped_over(tmp_path: Path) -> None:
    log = RankLog(tmp_path / "rank.sqlite")
    log.save(1, Position(2), 1, training()[0][:2], [0, 1])
    log.save(2, Position(4), 1, [], [3])
    assert log.stepped_over(1) == [0, 1]
    assert log.stepped_over(2) == [0, 1, 3]
    log.close()


# The trainer's checkpoints, of launches that have ended.


def launch(directory: Path, checkpoints: int, ranks: int = 1) -> Launch:
    directory.mkdir()
    for rank in range(ranks):
        log = RankLog(directory / f"rank-{rank}.sqlite")
        for number in range(1, checkpoints + 1 - rank):
            log.save(number, Position(number), 1, [Trained(Position(number - 1), [])])
        log.close()
    return Launch(directory, ranks, "id")


def test_a_checkpoint_is_one_once_all_ranks_have_it(tmp_path: Path) -> None:
    assert launch(tmp_path / "one", checkpoints=3, ranks=2).checkpoints == {1: Position(1), 2: Position(2)}


def test_a_trainer_that_goes_back_a_checkpoint_forgets_what_it_trained_after_that(tmp_path: Path) -> None:
    one, two = launch(tmp_path / "one", 2), launch(tmp_path / "two", 2)
    training: tuple[Launch, ...] = (replace(one, up_to=2), replace(two, up_to=2))
    training = before(training)
    assert [(one.directory.name, one.up_to) for one in training] == [("one", 2), ("two", 1)]
    assert [trained.position for trained in training[-1].effects()[0]] == [Position(0)]
    training = before(training)
    assert [(one.directory.name, one.up_to) for one in training] == [("one", 2)]
    assert before(before(training)) == ()


# The runs next to it.


@pytest.mark.parametrize(
    ("shard", "exported"),
    [
        ({"a": "1"}, {"a": "1", "b": "2"}),
        ({"a": "1", "b": "2"}, {"a": "1"}),
        ({"a": "1", "b": "2", "deleted-0-1": "3"}, {"a": "1", "b": "2"}),
        ({"a": "1", "b": "2"}, {"a": "1", "b": "of another run"}),
    ],
)
def test_a_neighbour_that_lacks_rows_or_holds_those_of_another_run_is_hurt(
    shard: dict[str, Any], exported: dict[str, Any]
) -> None:
    assert wrong_rows({"a": "1", "b": "2"}, shard, exported)


def test_a_neighbour_that_holds_its_rows_is_not_hurt() -> None:
    rows = {"a": "1", "b": "2"}
    assert wrong_rows(rows, dict(rows), dict(rows)) is None


def test_a_report_with_a_neighbour_that_was_hurt_is_not_clean() -> None:
    assert Report("journal").is_clean
    assert not Report("journal", neighbours_hurt=["neighbour-1: its shard lacks ['a']"]).is_clean


def test_all_campaigns_together_have_all_faults() -> None:
    assert [share(1000, 6, number) for number in range(6)] == [167, 167, 167, 167, 166, 166]


def test_a_workers_log_says_when_something_happened_to_a_group_and_which_it_gave_up(tmp_path: Path) -> None:
    log = WorkerLog(tmp_path / "worker.log")
    log.write("begin", "w0-1", 0, 0)
    log.write("row", "w0-1", 0, 0, 0, "ACCEPTED")
    log.write("failed", "w0-1", "NotFoundError")
    read = WorkerLog.read(log.path)
    assert read.rows == [("w0-1", 0, 0, 0, "ACCEPTED")]
    assert read.failed == {"w0-1"}
    assert len(read.times["w0-1"]) == 3
