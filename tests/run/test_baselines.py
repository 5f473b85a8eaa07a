"""The running baselines of `rae` are part of the run's log."""

from __future__ import annotations

from typing import Any

from gristmill_service.pipeline import build_batch
from gristmill_service.pipeline.credit.baselines import BaselineKey
from gristmill_service.pipeline.plan_document import PlanDocument, decode_plan
from gristmill_service.pipeline.scheduling.schedule import MisalignedError
from gristmill_service.run.machine.answers import Position
from gristmill_service.run.machine.decisions.resume import Checkpoint
from tests.run.harness import Bench, group_rows, row

RAE: dict[str, Any] = {
    "advantage_estimator": "rae",
    "rae": {"decay": 0.5},
    "train_batch_size": 1,
    "policy_mini_batch_size": 1,
    "n_samples_per_prompt": 2,
}
KEY = BaselineKey("", "")


def plan_of(bench: Bench, batch: int) -> PlanDocument:
    return decode_plan(bench.run._builder.plans[batch])


def baselines(bench: Bench, batch: int) -> tuple[float, float]:
    """Before and after a batch."""
    [one] = plan_of(bench, batch).baselines or []
    return one.before, one.after


def published(bench: Bench, uid: str) -> tuple[float, float]:
    """The baselines around the batch that this group becomes; its scores are 0 and 1."""
    bench.submit(*group_rows(uid))
    batch = bench.state.batches_sealed - 1
    bench.make_batches()
    return baselines(bench, batch)


def test_a_batch_begins_with_the_baselines_of_the_batch_before_also_after_a_restart() -> None:
    bench = Bench(build_batch=build_batch, **RAE)
    assert published(bench, "a") == (0.0, 0.5)
    bench.reopen()
    assert published(bench, "b") == (0.5, 0.625)
    assert bench.state.baselines == {KEY: 0.625}
    assert bench.replayed() == bench.state


def test_a_batch_whose_shards_are_lost_is_built_again_with_the_same_baselines() -> None:
    bench = Bench(build_batch=build_batch, **RAE)
    published(bench, "a")
    published(bench, "b")
    bench.store.free("run", 0)
    bench.reopen()
    bench.make_batches()
    assert baselines(bench, 0) == (0.0, 0.5)
    assert bench.state.baselines == {KEY: 0.625}
    assert published(bench, "c") == (0.625, 0.65625)


def test_batches_for_other_ranks_begin_with_the_same_baselines() -> None:
    bench = Bench(build_batch=build_batch, **RAE)
    published(bench, "a")
    published(bench, "b")
    bench.run.resume("policy", Checkpoint(Position(0)), "launch", 2)
    bench.make_batches()
    assert [baselines(bench, batch) for batch in (0, 1)] == [(0.0, 0.5), (0.5, 0.625)]
    assert [plan_of(bench, batch).dp_size for batch in (0, 1)] == [2, 2]
    assert bench.state.baselines == {KEY: 0.625}


def test_a_batch_that_fails_changes_no_baseline() -> None:
    def fails_once(steps: Any, config: Any, *, batch: int, **more: Any) -> Any:
        if batch == 0:
            raise RuntimeError("cannot be built")
        return build_batch(steps, config, batch=batch, **more)

    bench = Bench(build_batch=fails_once, **RAE)
    bench.submit(*group_rows("a"))
    bench.make_batches()
    assert bench.state.failed
    assert published(bench, "b") == (0.0, 0.5)


def misaligned_for(*pairs: tuple[int, int]) -> Any:
    """Batches, each with a dp_size for which it cannot be aligned."""

    def build(steps: Any, config: Any, *, batch: int, **more: Any) -> Any:
        if (batch, config.dp_size) in pairs:
            raise MisalignedError("cannot be aligned")
        return build_batch(steps, config, batch=batch, **more)

    return build


def test_a_published_batch_that_fails_for_other_ranks_keeps_its_change() -> None:
    bench = Bench(build_batch=misaligned_for((0, 2)), **RAE)
    published(bench, "a")
    published(bench, "b")
    bench.run.resume("policy", Checkpoint(Position(0)), "launch", 2)
    bench.make_batches()
    assert list(bench.state.failed) == [0]
    assert baselines(bench, 1) == (0.5, 0.625)
    assert published(bench, "c") == (0.625, 0.65625)


def test_a_misaligned_batch_that_is_built_for_other_ranks_follows_those_published_meanwhile() -> None:
    bench = Bench(build_batch=misaligned_for((0, 1)), **RAE)
    bench.submit(*group_rows("a"))
    bench.make_batches()
    assert published(bench, "b") == (0.0, 0.5)
    bench.run.resume("policy", Checkpoint(Position(0)), "launch", 2)
    bench.make_batches()
    assert baselines(bench, 0) == (0.5, 0.625)
    assert baselines(bench, 1) == (0.0, 0.5)
    assert published(bench, "c") == (0.625, 0.65625)


def test_agents_have_baselines_of_their_own() -> None:
    bench = Bench(build_batch=build_batch, **RAE)
    bench.submit(row("a", 0, agent="solver", reward=1.0), row("a", 1, agent="judge", reward=4.0))
    bench.make_batches()
    assert bench.state.baselines == {BaselineKey("", "judge"): 2.0, BaselineKey("", "solver"): 0.5}
