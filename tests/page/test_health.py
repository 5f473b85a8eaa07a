"""A run's health: its state, what holds it up and since when, and nothing that happened before it was watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

from gristmill._wire.column_spec import ColumnSpec
from gristmill._wire.rows import from_rows
from gristmill._wire.steps import TrajectoryKey
from gristmill_service.config import RunConfig
from gristmill_service.monitoring.collectors.run_monitor import Monitor
from gristmill_service.monitoring.health.findings import STATES
from gristmill_service.monitoring.health.health import Overview, RunHealth, health, timeline
from gristmill_service.pipeline import build_batch
from gristmill_service.pipeline.scheduling.plan import ShardAddress
from gristmill_service.run.machine.answers import BatchState
from gristmill_service.run.machine.decisions.resume import Checkpoint
from gristmill_service.storage.memory import MemoryShardStore
from tests.on_loop import Run, Runs, Service, on_loop
from tests.page import stage
from tests.run.harness import BuildBatch, Shelf


class Watched:
    """A run whose time moves when the test says so."""

    def __init__(self, *, store: Any = None, build_batch: Any = build_batch, **settings: Any) -> None:
        self.now = 1_000_000.0
        store = store or MemoryShardStore()
        self.runs = Runs(store, build_batch=build_batch, clock=lambda: self.now, make_monitor=Monitor)
        self.runs.create("r", RunConfig.model_validate({**stage.CONFIG, **settings}))
        self.run: Run = self.runs.get("r")

    def after(self, seconds: float) -> None:
        self.now += seconds

    def fill(self, *uids: str) -> None:
        self.run.begin_groups(0, uids)
        self.run.submit(from_rows([row for uid in uids for row in stage.group(uid)], step_wise=True))

    def fill_with_equal_scores(self, uid: str) -> None:
        self.run.begin_groups(0, [uid])
        self.run.submit(from_rows([row | {"reward": 0.0} for row in stage.group(uid)], step_wise=True))

    def seal(self, *uids: str) -> None:
        before = self.run.status().batches_published
        self.fill(*uids)
        stage.until(lambda: self.run.status().batches_published > before)

    def train(self, batch: int = 0, *, commit: bool = True) -> None:
        for mini_batch in range(2):
            for rank in range(2):
                stage.acknowledge(self.run, rank, mini_batch, batch=batch, commit=commit)

    def health(self) -> RunHealth:
        answer: RunHealth = on_loop(health, self.run)
        return answer

    def findings(self) -> list[tuple[str, str, float | None]]:
        """Level, words, and for how long."""
        answer = self.health()
        return [
            (one.level, one.sentence, None if one.since is None else round(answer.now - one.since, 1))
            for one in answer.findings
        ]

    def worst(self) -> list[tuple[str, str, float | None]]:
        """All that is more than a note."""
        return [finding for finding in self.findings() if finding[0] != "note"]


@pytest.fixture
def watched() -> Any:
    made: list[Watched] = []

    def make(**settings: Any) -> Watched:
        made.append(Watched(**settings))
        return made[-1]

    yield make
    for one in made:
        one.runs.close(5)


Make = Callable[..., Watched]


def test_a_rank_that_holds_up_the_others_is_stuck(watched: Make) -> None:
    one = watched()
    one.after(5)
    one.seal("a", "b")
    one.after(1)
    stage.acknowledge(one.run, 0, 0)
    one.after(70)
    [(level, text, seconds)] = one.findings()
    # As of when it was published: that is when the rank could have begun.
    assert (level, seconds) == ("stuck", 71.0)
    assert text == ("policy rank 1 did not even pull batch 0 mini-batch 0, which is published; 1 other rank is past it")
    one.run.shard("policy", 1, None, 0)
    one.after(1)
    assert "policy rank 1 did not acknowledge" in one.findings()[0][1]
    assert (one.health().state, one.health().summary) == ("stuck", one.findings()[0][1])
    stage.acknowledge(one.run, 1, 0)
    assert (one.health().state, one.findings()) == ("training", [])


def test_a_trainer_that_takes_its_usual_time_is_well(watched: Make) -> None:
    one = watched()
    one.seal("a", "b")
    for mini_batch in range(2):
        one.after(100)
        for rank in range(2):
            stage.acknowledge(one.run, rank, mini_batch, commit=True)
    one.seal("c", "d")
    one.after(290)
    assert (one.health().state, one.worst()) == ("training", [])
    one.after(20)
    [(level, text, seconds)] = one.worst()
    assert (one.health().state, level, seconds) == ("training", "slow", 310.0)
    assert text == (
        "policy ranks 0, 1 did not even pull batch 1 mini-batch 0, which is published; the longest step before took "
        "100 s"
    )
    one.after(700)
    assert (one.health().state, one.worst()[0][0]) == ("stuck", "stuck")


def test_a_batch_of_equal_scores_is_a_finding_and_so_are_aborted_and_retried_samples(watched: Make) -> None:
    one = watched()
    rows = [row | {"reward": 0.0} for uid in ("a", "b") for row in stage.group(uid)]
    one.run.begin_groups(0, ["a", "b", "c"])
    one.run.submit(from_rows(rows, step_wise=True))
    stage.until(lambda: one.run.status().batches_published == 1)
    [(level, text, _)] = one.worst()
    why = "all advantages are 0: the samples of each of its 2 groups have equal scores, 0 on average"
    assert (level, text.partition(";")[0]) == ("slow", f"nothing is learned from batch 0: {why}")
    one.run.abort_trajectories([TrajectoryKey(0, "c", 1)], "no sandbox")
    one.run.submit(from_rows([stage.turn("c", 1, 0, [1], [2], attempt=1, is_last_step=False)], step_wise=True))
    one.run.abort_trajectories([TrajectoryKey(0, "c", 0)], "no sandbox")
    answer = one.health()
    assert [(why.reason, why.samples, why.uid) for why in answer.samples_aborted] == [("no sandbox", 2, "c")]
    assert answer.samples_retried == 1
    [group] = answer.open_groups
    assert (group.aborted, group.retried) == (1, 1)


def test_a_first_step_may_take_long(watched: Make) -> None:
    one = watched()
    one.seal("a", "b")
    for rank in range(2):
        one.run.shard("policy", rank, None, 0)
    one.after(500)
    assert one.worst() == []
    one.after(100)
    [(level, text, _)] = one.worst()
    assert (level, text.endswith("; they took no step yet")) == ("slow", True)
    one.after(1300)
    assert one.health().state == "stuck"


def test_many_ranks_that_stand_at_one_place_do_not_hold_up_each_other(watched: Make) -> None:
    one = watched(dp_size=200)
    one.seal("a", "b")
    one.after(200)
    assert (one.health().state, one.worst()) == ("no trainer", [])
    stage.acknowledge(one.run, 199, 0)
    [(level, text, _)] = one.worst()
    assert (level, text.endswith("and more did not even pull batch 0 mini-batch 0, which is published; 1 other rank "
                                 "is past it")) == ("stuck", True)  # fmt: skip


def test_ranks_that_wait_for_rollouts_are_well_and_learn_what_is_missing(watched: Make) -> None:
    one = watched()
    one.run.shard("policy", 0, None, 0)
    one.fill("a")
    one.run.begin_groups(0, ["b"])
    one.after(200)
    assert one.findings() == [
        ("note", "policy ranks wait for batch 0: 1 of 2 groups are complete; samples not begun: 2", 200.0)
    ]
    assert (one.health().state, one.health().summary) == (
        "collecting",
        "1 group is open, 1 complete; samples not begun: 2",
    )


def test_a_run_says_why_its_groups_are_not_complete(watched: Make) -> None:
    one = watched(n_samples_per_prompt=4)
    one.run.begin_groups(0, ["a", "b"])
    one.run.submit(
        from_rows(
            [
                stage.turn("a", 0, 0, [1], [2], reward=None),
                stage.turn("a", 1, 0, [1], [2], is_last_step=False),
                stage.turn("a", 2, 1, [1], [2]),
                stage.turn("a", 3, 0, [1], [2]),
                stage.turn("b", 0, 0, [1], [2], reward=None),
            ],
            step_wise=True,
        )
    )
    of_a = "samples without a reward: 1, without their last step or an earlier one: 2"
    assert [group.reason for group in one.health().open_groups] == [
        of_a,
        "samples without a reward: 1, not begun: 3",
    ]
    assert one.health().summary == (
        "2 groups are open, 0 complete; samples without a reward: 2, without their last step or an earlier one: 2, "
        "not begun: 3"
    )
    one.after(400)
    assert one.worst()[0][1] == f"2 groups are open for long; the oldest, 'a', has 1 of 4 samples; {of_a}"


def test_of_many_open_groups_the_oldest_are_examined(watched: Make) -> None:
    one = watched(max_buffered_batches=200)
    one.run.begin_groups(0, [f"p{number}" for number in range(300)])
    assert one.health().summary == "300 groups are open, 0 complete; samples not begun: 200 (in the oldest 100 groups)"


def test_a_finished_run_says_how_many_groups_it_dropped_because_they_were_not_complete(watched: Make) -> None:
    one = watched()
    one.run.begin_groups(0, ["a"])
    one.run.finish()
    assert one.health().summary == "finished, 0 batches trained; 1 incomplete group dropped"


def test_a_run_whose_last_groups_were_all_dropped_says_so_and_why(watched: Make) -> None:
    one = watched(zero_variance_filter="replace")
    for number in range(15):
        one.fill_with_equal_scores(f"p{number}")
    assert one.worst() == []
    one.run.begin_groups(0, ["x"])
    one.run.abort_groups(0, ["x"], "TimeoutError")
    reasons = "15 zero_variance, 1 TimeoutError"
    assert one.worst() == [
        (
            "slow",
            f"the last 16 groups were all dropped, and none reached a batch: {reasons}; check the rewards, which are "
            "equal within each group, or sample prompts that some samples solve",
            None,
        )
    ]
    one.fill("a")
    assert one.worst() == [], "a complete group is waiting for its batch"
    one.seal("b")
    one.fill_with_equal_scores("q")
    assert one.worst() == [], "the count begins again with each batch"


def test_as_many_groups_must_be_dropped_as_a_batch_has(watched: Make) -> None:
    one = watched(train_batch_size=20, max_buffered_batches=2)
    for number in range(20):
        assert one.worst() == []
        one.run.begin_groups(0, [f"p{number}"])
        one.run.abort_groups(0, [f"p{number}"], "TimeoutError")
    assert one.worst()[0][1].endswith("20 TimeoutError; see the logs of the workers, which aborted these groups")


def test_ranks_that_wait_for_a_call_to_seal_learn_so(watched: Make) -> None:
    one = watched(seal_by="call")
    one.run.shard("policy", 0, None, 0)
    for uid in "abc":
        one.fill(uid)
    [(_, text, _)] = one.findings()
    assert text == "policy ranks wait for batch 0, which SealBatch seals (seal_by: call): 3 groups complete"


def test_a_run_without_rollouts_is_idle_for_ever(watched: Make) -> None:
    one = watched()
    one.after(100_000)
    assert (one.health().state, one.worst()) == ("idle", [])


def test_workers_that_wait_for_a_trainer_that_trains_are_well(watched: Make) -> None:
    one = watched(max_buffered_batches=1)
    one.run.shard("policy", 0, None, 0)
    one.seal("a", "b")
    one.after(90)
    [(level, text, seconds)] = one.findings()
    assert (level, seconds) == ("note", 90.0)
    assert text.startswith(
        "workers wait for capacity: max_buffered_batches: 1 batches of train_batch_size: 2 are stored"
    )
    answer = one.health()
    assert (answer.state, answer.summary) == (
        "training",
        "workers wait for the trainer: 1 batch not committed, policy rank 0 is at batch 0 mini-batch 0",
    )


def test_a_run_that_no_trainer_ever_called_says_so_until_one_asks(watched: Make) -> None:
    one = watched()
    assert (one.health().state, one.findings()[0][1]) == (
        "idle",
        "no trainer has called yet; batch 0: 0 of 2 groups are complete",
    )
    one.seal("a", "b")
    assert (one.health().state, one.health().summary) == (
        "no trainer",
        "no trainer has called yet: 1 batch not committed, policy rank 0 is at batch 0 mini-batch 0",
    )
    one.after(600)
    assert one.worst()[0][1].startswith("no trainer has called yet, and policy batch 0 mini-batch 0 is published")
    one.run.shard("policy", 1, None, 0)
    assert (one.health().state, one.health().models[0].has_trainer) == ("training", True)


def test_a_trainer_that_never_commits_is_stuck(watched: Make) -> None:
    one = watched(max_buffered_batches=1)
    one.seal("a", "b")
    one.after(500)
    one.train(commit=False)
    one.after(50)
    assert one.health().state == "training"
    assert one.health().summary.startswith("1 batch trained and not committed; workers wait for capacity: max_buffered")
    one.after(15)
    [(level, text, seconds)] = one.worst()
    assert (one.health().state, level, seconds) == ("stuck", "stuck", 65.0)
    assert text.startswith("workers wait for capacity, and ranks for a batch: max_buffered_batches: 1")
    assert "wait for the trainer to commit one" in text


def test_pacing_that_stops_workers_is_named_at_once_and_stuck_after_a_minute(watched: Make) -> None:
    one = watched(max_batches_ahead=0)
    one.seal("a", "b")
    one.train()
    pacing = (
        "max_batches_ahead: 0 allows 2 untrained groups: 0 are open, and 2 in sealed batches; batch 0 is acknowledged"
    )
    assert one.health().state == "idle"
    assert one.health().summary.startswith(f"no group is open; workers wait for capacity: {pacing}")
    one.after(61)
    [(level, text, _)] = one.worst()
    assert (level, text[:80]) == ("stuck", f"workers wait for capacity, and ranks for a batch: {pacing}"[:80])
    one.run.announce(1)
    assert (one.health().state, one.health().summary) == ("idle", "no group is open: no rollouts come")


def test_groups_that_are_open_for_long_are_reported_oldest_first(watched: Make) -> None:
    one = watched()
    one.after(1)
    one.run.begin_groups(0, ["late"])
    one.after(2)
    one.run.begin_groups(0, ["later"])
    one.after(400)
    assert one.worst() == [
        ("slow", "2 groups are open for long; the oldest, 'late', has 0 of 2 samples; samples not begun: 2", 402.0)
    ]
    assert [group.uid for group in one.health().open_groups] == ["late", "later"]
    assert one.health().state == "collecting"
    one.after(1500)
    assert (one.health().state, one.worst()[0][1].endswith(", and no row arrives")) == ("stuck", True)


def test_groups_that_are_open_for_long_hold_nobody_up_while_ranks_train(watched: Make) -> None:
    one = watched()
    one.run.begin_groups(0, ["late"])
    one.after(400)
    one.seal("a", "b")
    assert one.findings() == [
        ("note", "1 group is open for long; the oldest, 'late', has 0 of 2 samples; samples not begun: 2", 400.0)
    ]  # fmt: skip


FAILS = {"merge": "none", "on_misaligned": "error", "micro_batch": {"max_tokens": 100}, "dp_size": 2}


def test_a_run_whose_batch_cannot_be_built_is_failed_until_a_later_one_is_trained(watched: Make) -> None:
    one = watched(**FAILS, n_samples_per_prompt=1, train_batch_size=1)
    one.run.begin_groups(0, ["a"])
    # One row makes no two ranks.
    one.run.submit(from_rows([stage.turn("a", 0, 0, [1], [2])], step_wise=True))
    stage.until(lambda: bool(one.run.status().failed_batches))
    one.after(1000)
    level, text, seconds = one.findings()[0]
    assert (level, seconds) == ("failed", 1000.0)
    assert text.startswith("batch 0 could not be built: ")
    assert "its rows are kept; resume with a dp_size that aligns it" in text
    assert (one.health().state, one.health().summary) == ("failed", text)
    [held] = one.health().batches
    assert (held.batch, held.state) == (0, "failed")
    assert held.since is not None
    one.run.begin_groups(0, ["b"])
    rows = [stage.turn("b", 0, step, [1], [2], is_last_step=step == 1, reward=0.0) for step in range(2)]
    one.run.submit(from_rows(rows, step_wise=True))
    stage.until(lambda: one.run.status().batches_published == 2)
    assert one.health().state == "failed"
    for rank in range(2):
        stage.acknowledge(one.run, rank, 0, batch=1, commit=True)
    assert (one.health().state, one.worst()) == ("idle", [])
    assert one.findings()[0][1].startswith("batch 0 could not be built and is left out: ")
    assert one.health().batches == []


def test_a_run_whose_failed_batch_other_ranks_align_is_well(watched: Make) -> None:
    one = watched(**FAILS, n_samples_per_prompt=1, train_batch_size=1)
    one.run.begin_groups(0, ["a"])
    one.run.submit(from_rows([stage.turn("a", 0, 0, [1], [2])], step_wise=True))
    stage.until(lambda: bool(one.run.status().failed_batches))
    one.after(10)
    one.run.resume("policy", Checkpoint(None), "alone", 1)
    stage.until(lambda: one.run.status().batches_published == 1)
    assert (one.health().state, one.worst()) == ("training", [])
    assert [(held.batch, held.state) for held in one.health().batches] == [(0, "published")]


def test_a_batch_that_is_lost_for_good_is_reported_so(watched: Make) -> None:
    one = watched(build_batch=BuildBatch(fails=[0]))
    one.fill("a", "b")
    stage.until(lambda: bool(one.run.status().failed_batches))
    [(level, text, _)] = one.worst()
    assert level == "failed"
    assert text.endswith("fix the cause, and sample them again in another round")


@pytest.mark.parametrize(("places", "why"), [(0, "the shelf is full"), (-1, "the shelf refuses this user")])
def test_a_batch_that_the_store_does_not_take_is_stuck_with_the_reason(watched: Make, places: int, why: str) -> None:
    one = watched(store=Shelf(places))
    one.fill("a", "b")
    stage.until(lambda: one.health().state == "stuck", 30)
    assert one.worst()[0][1].startswith(f"run 'r': batch 0 waits: {why}")


def test_a_log_of_which_no_snapshot_can_be_written_is_a_finding_and_the_run_goes_on(watched: Make) -> None:
    one = watched()
    one.run._target.compaction.failed = "the file system of /journal is full"
    one.fill("a")
    [(level, text, _)] = one.worst()
    assert level == "slow"
    assert text.startswith("no snapshot of the run's log could be written, so the log grows")
    assert ": the file system of /journal is full; nothing is lost" in text
    assert one.health().state == "collecting"


def test_a_run_that_is_done_is_finished(watched: Make) -> None:
    one = watched()
    one.seal("a", "b")
    one.run.finish()
    one.train()
    one.after(1000)
    answer = one.health()
    assert (answer.state, answer.summary, one.findings()) == ("finished", "finished, 1 batch trained", [])
    # Its timeline ends when it did.
    assert on_loop(timeline, one.run, "policy", 600).end == answer.last_event == answer.now - 1000


def test_when_a_run_last_moved_is_known(watched: Make) -> None:
    one = watched()
    one.after(100)
    assert one.health().now - one.health().last_event == 100.0
    one.run.begin_groups(0, ["a"])
    one.after(7)
    assert (one.health().now - one.health().last_event, one.health().now - one.health().rows_since) == (7.0, 107.0)
    one.run.submit(from_rows(stage.group("a"), step_wise=True))
    assert one.health().now - one.health().rows_since == 0.0


def test_the_time_line_has_what_each_rank_passed_and_when(watched: Make) -> None:
    one = watched()
    one.after(1)
    one.seal("a", "b")
    one.after(1)
    stage.acknowledge(one.run, 0, 0)
    one.after(3)
    stage.acknowledge(one.run, 0, 1)
    stage.acknowledge(one.run, 1, 0)
    one.after(4)
    line = on_loop(timeline, one.run, "policy", 600)
    passed = [[(round(at - line.begin, 1), *place) for at, *place in rank.passed] for rank in line.ranks]
    # At the very moment, whenever somebody looks.
    assert passed == [[(2.0, 0, 0, 0), (5.0, 0, 0, 1)], [(5.0, 0, 0, 0)]]
    assert [(batch.batch, round(batch.published - line.begin, 1)) for batch in line.batches] == [(0, 1.0)]
    assert round(line.end - line.begin, 1) == 9.0
    short = on_loop(timeline, one.run, "policy", 5)
    assert [rank.passed for rank in short.ranks] == [line.ranks[0].passed[1:], line.ranks[1].passed]


def test_a_trainer_that_starts_again_begins_a_new_time_line(watched: Make) -> None:
    one = watched()
    one.seal("a", "b")
    stage.acknowledge(one.run, 0, 0)
    one.after(1)
    one.run.resume("policy", Checkpoint(None), "again", 1)
    one.after(1)
    assert [rank.passed for rank in on_loop(timeline, one.run, "policy", 600).ranks] == [[]]


def test_a_batch_that_failed_is_no_step_of_a_rank(watched: Make) -> None:
    one = watched(**FAILS, n_samples_per_prompt=1, train_batch_size=1)
    for uid, steps in (("a", 1), ("b", 2)):
        one.run.begin_groups(0, [uid])
        rows = [stage.turn(uid, 0, at, [1], [2], is_last_step=at == steps - 1, reward=0.0) for at in range(steps)]
        one.run.submit(from_rows(rows, step_wise=True))
    stage.until(lambda: one.run.status().batches_published == 2)
    stage.acknowledge(one.run, 0, 0, batch=1)
    assert [[entry[1:] for entry in rank.passed] for rank in on_loop(timeline, one.run, "policy", 600).ranks] == [
        [(1, 0, 0)],
        [],
    ]


def test_answers_stay_small_whatever_a_run_holds(watched: Make) -> None:
    one = watched(dp_size=512, train_batch_size=4096, policy_mini_batch_size=4096, n_samples_per_prompt=1)
    one.run.begin_groups(0, [f"{'long' * 100}{number}" for number in range(4096)])
    answer = one.health()
    assert (len(answer.open_groups), len(answer.models[0].ranks)) == (20, 128)
    assert answer.models[0].ranks_in_all == 512
    assert len(answer.model_dump_json()) < 100_000


@pytest.fixture
def client(service: Service) -> Any:
    with httpx.Client(base_url=service.http_url, trust_env=False) as session:
        yield session


def test_the_overview_says_how_every_run_is(service: Service, client: httpx.Client, run_name: str) -> None:
    stage.published(
        service.runs, run_name, stage.CONFIG, [from_rows([*stage.group("a"), *stage.group("b")], step_wise=True)]
    )
    answer = client.get("/v1/overview")
    Overview.model_validate(answer.json())
    [shown] = [run for run in answer.json()["runs"] if run["run"] == run_name]
    assert (shown["state"], shown["newest_batch"], shown["batches_published"]) == ("no trainer", 0, 1)


def test_what_is_the_same_is_not_sent_again(service: Service, client: httpx.Client, run_name: str) -> None:
    service.runs.create(run_name, stage.CONFIG)
    for path in ("/v1/overview", f"/v1/runs/{run_name}/health"):
        first = client.get(path)
        asked = {"If-None-Match": first.headers["etag"]}
        assert client.get(path, headers=asked).status_code == 304
        service.runs.get(run_name).begin_groups(0, [path])
        assert client.get(path, headers=asked).status_code == 200


def test_the_api_page_has_the_schema_of_each_answer(client: httpx.Client) -> None:
    schema = client.get("/openapi.json").json()
    answers = {
        path.removeprefix("/v1"): calls["get"]["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
        for path, calls in schema["paths"].items()
        if "page" in calls.get("get", {}).get("tags", [])
    }
    batch = "/runs/{run}/batches/{batch}"
    assert {path: reference.rpartition("/")[2] for path, reference in answers.items()} == {
        "/overview": "Overview",
        "/runs/{run}/health": "RunHealth",
        "/runs/{run}/timeline": "Timeline",
        "/runs/{run}/history": "BatchHistory",
        "/runs/{run}/settings": "RunSettings",
        "/runs/{run}/find": "FoundGroups",
        "/runs/{run}/samples": "GroupSamples",
        "/runs/{run}/samples/{sample}/rows/{step}": "OpenRowTokens",
        f"{batch}/distributions": "BatchDistributions",
        f"{batch}/rows/{{row}}": "RowTokens",
        f"{batch}/picture": "BatchPicture",
        f"{batch}/breaks": "BatchBreaks",
        f"{batch}/scores": "BatchScores",
    }
    health = schema["components"]["schemas"]["RunHealth"]
    assert health["properties"]["state"]["enum"] == list(STATES)
    assert health["properties"]["findings"]["items"]["$ref"].endswith("/Finding")


def test_a_batch_that_waits_for_columns_says_which_shards_lack_them_and_since_when_none_came(watched: Make) -> None:
    columns = (ColumnSpec.of({"name": "values", "dtype": "float32", "scope": "response", "source": "trainer"}),)
    one = watched(columns=columns, advantage_estimator="gae")
    one.fill("a", "b")
    stage.until(lambda: one.run.batch(0).state is BatchState.FORWARD)
    form = one.run._builder.forms[0][ShardAddress("policy", 0, 0)]
    one.run.shard("policy", 0, None, 0)
    assert (one.health().state, one.health().batches[0].state) == ("training", "waiting for columns")
    one.after(539)
    assert one.worst() == []
    one.run.write(0, 0, 0, 1, {"values": np.zeros(form.blocks[0].shape, np.float32)})
    one.after(540)
    words = (
        "batch 0 waits for values, which trainers write, of 3 of 4 policy shards: mini-batch 0 rank 1, mini-batch 1 "
        "rank 0, mini-batch 1 rank 1"
    )
    assert one.worst() == [("slow", words, 540.0)]
    assert one.health().summary == words
    one.after(1260)
    assert one.health().state == "stuck"
