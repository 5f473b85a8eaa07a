"""What is told of a run's health: what is stuck, since when, and nothing that happened before anybody looked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from gristmill._wire.rows import from_rows
from gristmill_service.api.http import page_models as models
from gristmill_service.config import RunConfig
from gristmill_service.monitoring.health import health, timeline
from gristmill_service.monitoring.history import HistoryRecorder
from gristmill_service.run.run import Run
from gristmill_service.run.runs import Runs
from gristmill_service.service import Service
from gristmill_service.storage.memory_shards import MemoryShardStore
from tests.page import stage


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class Watched:
    """A run whose time moves when the test says so, looked at after each move."""

    def __init__(self, **settings: Any) -> None:
        self.clock = Clock()
        self.runs = Runs(MemoryShardStore(), clock=lambda: self.clock.now)
        self.runs.create("r", RunConfig.model_validate({**stage.CONFIG, **settings}))
        self.run: Run = self.runs.get("r")
        self.watch = HistoryRecorder(self.runs.own, self.clock)
        self.watch.look()

    def after(self, seconds: float) -> None:
        """What happened until then is found now."""
        self.clock.now += seconds
        self.watch.look()

    def seal(self, *uids: str) -> None:
        before = self.run.status().batches_published
        self.run.begin_groups(0, uids)
        self.run.submit(from_rows([row for uid in uids for row in stage.group(uid)], step_wise=True))
        stage.until(lambda: self.run.status().batches_published > before)

    def health(self) -> dict[str, Any]:
        told = health(self.run, self.watch.seen(self.run), self.clock.now)
        models.Health.model_validate({**told, "now": self.clock.now})
        return told

    def findings(self) -> list[tuple[str, str, float | None]]:
        """Level, words, and for how long."""
        return [
            (one["level"], one["text"], None if one["since"] is None else round(self.clock.now - one["since"], 1))
            for one in self.health()["findings"]
        ]


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
    assert (level, seconds) == ("stuck", 70.0)
    assert text == ("policy rank 1 did not even pull batch 0 mini-batch 0, which is published; 1 other rank is past it")
    one.run.shard("policy", 1, None, 0)
    one.after(1)
    assert "policy rank 1 did not acknowledge" in one.findings()[0][1]
    assert one.health()["state"] == "stuck"
    stage.acknowledge(one.run, 1, 0)
    one.after(1)
    assert one.health()["state"] == "well"


def test_ranks_that_all_stand_still_are_slow(watched: Make) -> None:
    one = watched()
    one.seal("a", "b")
    one.after(1)
    for rank in range(2):
        one.run.shard("policy", rank, None, 0)
    assert one.findings() == []
    one.after(99)
    assert one.findings() == [
        ("slow", "policy ranks 0, 1 did not acknowledge batch 0 mini-batch 0, which is published", 99.0)
    ]


def test_ranks_that_wait_for_rollouts_are_told_with_what_is_missing(watched: Make) -> None:
    one = watched()
    one.run.begin_groups(0, ["a"])
    one.run.submit(from_rows(stage.group("a"), step_wise=True))
    one.after(10)
    assert one.findings() == [("note", "policy ranks wait for batch 0: 1 of 2 groups are complete", 10.0)]
    one.after(80)
    assert one.findings()[0][0] == "slow"


def test_workers_that_wait_for_room_are_told_why(watched: Make) -> None:
    one = watched(max_buffered_batches=1)
    one.seal("a", "b")
    one.after(1)
    one.after(20)
    [(level, text, seconds)] = one.findings()
    assert (level, seconds) == ("note", 20.0)
    assert text.startswith("workers wait for room: max_buffered_batches: 1 batches of train_batch_size: 2 are held")


def test_groups_that_are_open_for_long_are_told_oldest_first(watched: Make) -> None:
    one = watched()
    one.seal("a", "b")
    one.after(1)
    one.run.begin_groups(0, ["late"])
    one.after(2)
    one.run.begin_groups(0, ["later"])
    one.after(400)
    assert ("slow", "2 groups are open for long; the oldest, 'late', has 0 of 2 samples", 402.0) in one.findings()
    assert [group["uid"] for group in one.health()["open_groups"]] == ["late", "later"]


def test_a_batch_that_failed_is_told_with_the_reason(watched: Make) -> None:
    one = watched(merge="none", on_misaligned="error", micro_batch={"max_tokens": 100}, dp_size=3)
    one.run.begin_groups(0, ["a", "b"])
    rows = [stage.turn(uid, sample, 0, [1], [2]) for uid in "ab" for sample in range(2)]
    one.run.submit(from_rows(rows, step_wise=True))
    stage.until(lambda: bool(one.run.status().failed_batches))
    one.after(1)
    level, text, seconds = one.findings()[0]
    assert (level, seconds) == ("slow", None)
    assert text.startswith("batch 0 failed: ")


def test_a_run_that_is_done_is_finished(watched: Make) -> None:
    one = watched()
    one.seal("a", "b")
    one.run.finish()
    for mini_batch in range(2):
        for rank in range(2):
            stage.acknowledge(one.run, rank, mini_batch, commit=True)
    one.after(1)
    one.after(1000)
    assert (one.health()["state"], one.findings()) == ("finished", [])


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
    told = timeline(one.run, one.watch.seen(one.run), "policy", one.clock.now, 600)
    models.Timeline.model_validate(told)
    began = told["begin"]
    assert [[at - began, *place] for at, *place in told["ranks"][0]["passed"]] == [[5.0, 0, 0, 0], [9.0, 0, 0, 1]]
    assert [[at - began, *place] for at, *place in told["ranks"][1]["passed"]] == [[9.0, 0, 0, 0]]
    assert [(batch["batch"], batch["published"] - began) for batch in told["batches"]] == [(0, 2.0)]
    short = timeline(one.run, one.watch.seen(one.run), "policy", one.clock.now, 2)
    assert [rank["passed"] for rank in short["ranks"]] == [told["ranks"][0]["passed"][1:], told["ranks"][1]["passed"]]


def test_a_trainer_that_starts_again_begins_a_new_time_line(watched: Make) -> None:
    one = watched()
    one.seal("a", "b")
    stage.acknowledge(one.run, 0, 0)
    one.after(1)
    one.run.resume("policy", None, "again", 1)
    one.after(1)
    told = timeline(one.run, one.watch.seen(one.run), "policy", one.clock.now, 600)
    assert [rank["passed"] for rank in told["ranks"]] == [[]]


def test_answers_stay_small_whatever_a_run_holds(watched: Make) -> None:
    one = watched(dp_size=512, train_batch_size=4096, policy_mini_batch_size=4096, n_samples_per_prompt=1)
    one.run.begin_groups(0, [f"{'long' * 100}{number}" for number in range(4096)])
    one.after(1)
    told = one.health()
    assert (len(told["open_groups"]), len(told["models"][0]["ranks"])) == (20, 128)
    assert told["models"][0]["ranks_in_all"] == 512


@pytest.fixture
def client(service: Service) -> Any:
    with httpx.Client(base_url=service.http_url, trust_env=False) as found:
        yield found


def test_the_overview_tells_how_every_run_is(service: Service, client: httpx.Client, run_name: str) -> None:
    stage.published(
        service.runs, run_name, stage.CONFIG, [from_rows([*stage.group("a"), *stage.group("b")], step_wise=True)]
    )
    answer = client.get("/v1/overview")
    models.Overview.model_validate(answer.json())
    [found] = [run for run in answer.json()["runs"] if run["run"] == run_name]
    assert (found["state"], found["newest_batch"], found["batches_published"]) == ("well", 0, 1)


def test_what_is_the_same_is_not_sent_again(service: Service, client: httpx.Client, run_name: str) -> None:
    service.runs.create(run_name, stage.CONFIG)
    for path in ("/v1/overview", f"/v1/runs/{run_name}/health"):
        first = client.get(path)
        asked = {"If-None-Match": first.headers["etag"]}
        assert client.get(path, headers=asked).status_code == 304
        service.runs.get(run_name).begin_groups(0, [path])
        assert client.get(path, headers=asked).status_code == 200
