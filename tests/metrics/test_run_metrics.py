"""What /metrics makes of a run: its state, and what it counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gristmill._wire.steps import TrajectoryKey
from gristmill_service.monitoring.health.findings import STATES
from gristmill_service.monitoring.health.health import health
from gristmill_service.monitoring.metrics import run_stats
from gristmill_service.pipeline import build_batch
from gristmill_service.run.machine.answers import Position
from gristmill_service.run.machine.decisions.resume import Checkpoint
from gristmill_service.storage.memory import MemoryShardStore
from tests.metrics.scraping import scraped
from tests.run.harness import Bench, BuildBatch, group_rows, row


def values(bench: Bench, name: str) -> dict[str, float]:
    return {labels: value for labels, value in scraped([bench.run]).of(name).items() if value}


def test_lost_rows_are_distinguished_from_what_clients_gave_up() -> None:
    bench = Bench()
    bench.state.groups_dropped |= {"rows_lost": 2, "the environment crashed": 1, "bad prompt": 3}
    assert values(bench, "gristmill_groups_dropped_total") == {"aborted": 4, "rows_lost": 2}


def test_rows_are_counted_by_why_they_are_not_trained() -> None:
    bench = Bench(group_timeout_s=10.0, min_samples=1, max_staleness=1, stale="drop")
    bench.begin("a", "b", "c", "d")
    version: dict[str, Any] = {"policy_version": 0}
    bench.submit(*group_rows("a", response=[7, 8], **version))
    bench.run.abort_groups(0, ["a"], "the environment crashed")
    bench.submit(row("b", 0, 0, last=False, **version), row("b", 0, 1, attempt=1, **version))
    bench.submit(row("c", 0, **version), row("c", 1, 0, last=False, **version))
    bench.run.abort_trajectories([TrajectoryKey(0, "b", 0)], "bad")
    bench.now = 11.0
    bench.run.tick()
    assert values(bench, "gristmill_rows_dropped_total") == {"superseded": 1, "aborted": 3, "timeout": 1}
    assert values(bench, "gristmill_tokens_dropped_total") == {"superseded": 3, "aborted": 8 + 3, "timeout": 3}
    assert values(bench, "gristmill_groups_shortened_total") == {"timeout": 1}


def test_agents_components_and_baselines_have_gauges() -> None:
    settings: dict[str, Any] = {"advantage_estimator": "rae", "rae": {"decay": 0.5}, "train_batch_size": 1}
    bench = Bench(build_batch=build_batch, **settings, policy_mini_batch_size=1)
    judge = row("a", 0, agent="judge", reward=2.0, reward_components={"format": 0.5})
    bench.submit(judge, row("a", 1, agent="solver", reward=1.0, reward_components={"format": 1.0}))
    bench.make_batches()
    assert values(bench, "gristmill_agent_score_mean") == {"judge": 2, "solver": 1}
    assert values(bench, "gristmill_reward_component_mean") == {"format": 0.75}
    assert values(bench, "gristmill_running_baseline") == {"none/judge": 1, "none/solver": 0.5}


def test_a_worker_that_finds_no_room_is_throttled_until_it_finds_some() -> None:
    bench = Bench(max_buffered_batches=1)
    assert bench.begin("a", "b") == ["ADMITTED"] * 2
    bench.now = 1.0
    assert bench.begin("c") == ["NO_ROOM"]
    bench.now = 4.0
    assert values(bench, "gristmill_throttled_seconds_total") == {"": 3}
    bench.run.abort_groups(0, ["a"], "bad")
    assert bench.begin("c") == ["ADMITTED"]
    bench.now = 9.0
    assert values(bench, "gristmill_throttled_seconds_total") == {"": 3}
    assert bench.begin("d") == ["NO_ROOM"]
    bench.now = 500.0
    assert values(bench, "gristmill_throttled_seconds_total") == {"": 3 + 35}, "it has gone away"


def test_a_rank_waits_from_its_last_acknowledgement_until_the_next_shard_is_there() -> None:
    bench = Bench(dp_size=2, policy_mini_batch_size=2)
    ask(bench, 0)
    bench.now = 5.0
    ask(bench, 1)
    train(bench, "a", "b")
    assert values(bench, "gristmill_rank_wait_seconds_total") == {"policy,0": 5}
    bench.now = 7.0
    bench.run.acknowledge("policy", 0, ask(bench, 0), 0, commit=False)
    bench.now = 10.0
    assert values(bench, "gristmill_rank_wait_seconds_total") == {"policy,0": 8}
    assert values(bench, "gristmill_rank_lag_shards") == {"policy,1": 1}
    train(bench, "c", "d")
    bench.now = 20.0
    assert values(bench, "gristmill_rank_wait_seconds_total") == {"policy,0": 8}
    assert values(bench, "gristmill_rank_acknowledged_total") == {"policy,0": 1}
    assert values(bench, "gristmill_rank_pulls_total") == {"policy,0": 1}


def test_ranks_wait_only_while_their_trainer_is_there() -> None:
    bench = Bench(dp_size=2, policy_mini_batch_size=2)
    ask(bench, 0)
    ask(bench, 1)
    bench.now = 30.0
    ask(bench, 0)
    bench.now = 500.0
    waited = values(bench, "gristmill_rank_wait_seconds_total")
    assert waited == {"policy,0": 65, "policy,1": 65}, "one of its ranks was heard of 30 s ago"
    ask(bench, 0)
    bench.now = 510.0
    assert values(bench, "gristmill_rank_wait_seconds_total") == {"policy,0": 75, "policy,1": 75}


def test_nobody_waits_for_a_run_that_has_ended() -> None:
    bench = Bench()
    ask(bench, 0)
    bench.now = 2.0
    bench.run.finish()
    bench.now = 50.0
    assert values(bench, "gristmill_rank_wait_seconds_total") == {"policy,0": 2}


def test_ranks_that_are_gone_have_no_series() -> None:
    bench = Bench(dp_size=2, policy_mini_batch_size=2)
    for rank in range(2):
        ask(bench, rank)
    bench.run.resume("policy", Checkpoint(None), "again", dp_size=1)
    assert set(scraped([bench.run]).of("gristmill_rank_pulls_total")) == {"policy,0"}


def test_a_batch_that_is_rebuilt_is_counted_once() -> None:
    bench = Bench(build_batch=build_batch, store=MemoryShardStore(), dp_size=1)
    bench.begin("a", "b")
    bench.submit(*group_rows("a"), *group_rows("b"))
    bench.make_batches()
    bench.run.resume("policy", Checkpoint(None), "again", dp_size=2)
    bench.make_batches()
    assert values(bench, "gristmill_batch_rows_total") == {"submitted": 4, "trained": 4}
    assert values(bench, "gristmill_publish_seconds_count") == {"": 2}


def test_how_old_the_oldest_incomplete_group_is() -> None:
    bench = Bench()
    bench.begin("a")
    bench.now = 3.0
    bench.begin("b")
    bench.now = 10.0
    assert values(bench, "gristmill_oldest_open_group_seconds") == {"": 10}
    bench.submit(*group_rows("a"))
    assert values(bench, "gristmill_oldest_open_group_seconds") == {"": 7}


def test_a_run_is_in_one_state_and_it_is_the_one_that_the_api_reports() -> None:
    bench = Bench(build_batch=BuildBatch(fails=(1,)))
    seen = []

    def train_apart() -> None:
        train(bench, "c")
        train(bench, "d")

    steps: list[Callable[[], object]] = [
        lambda: None,
        lambda: bench.begin("a"),
        lambda: train(bench, "a", "b"),
        train_apart,
    ]
    for step in steps:
        step()
        states = scraped([bench.run]).of("gristmill_run_state")
        assert set(states) == set(STATES)
        [(state, _)] = values(bench, "gristmill_run_state").items()
        assert state == health(bench.run).state
        seen.append(state)
    assert seen == ["idle", "collecting", "no trainer", "failed"]


def test_statistics_are_of_the_moment_at_which_they_were_taken() -> None:
    bench = Bench(build_batch=build_batch, store=MemoryShardStore())
    ask(bench, 0)
    train(bench, "a", "b")
    stats = run_stats(bench.run)
    before = [list(metric.samples) for metric in stats]
    bench.now = 9.0
    train(bench, "c", "d")
    ask(bench, 0)
    assert [metric.samples for metric in stats] == before


def ask(bench: Bench, rank: int) -> Position:
    position: Position | None = bench.run.shard("policy", rank, None, 0).position
    assert position is not None
    return position


def train(bench: Bench, *uids: str) -> None:
    bench.begin(*uids)
    bench.submit(*(one for uid in uids for one in group_rows(uid)))
    bench.make_batches()
