"""The views of batches that are cached: they hold no run, and are never of another run or of other ranks."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any

from gristmill_service.monitoring.views.batch_view import BatchView, BatchViewCache
from gristmill_service.pipeline import build_batch
from gristmill_service.run.machine.decisions.resume import Checkpoint
from gristmill_service.storage.memory import MemoryShardStore
from tests.on_loop import on_loop
from tests.run.harness import Bench, group_rows, wait_until


class HookedStore(MemoryShardStore):
    """Calls `after_plan` once, when a plan was read."""

    def __init__(self) -> None:
        super().__init__()
        self.after_plan: Callable[[], object] | None = None

    def plan(self, run: str, batch: int) -> bytes:
        stored = super().plan(run, batch)
        hook, self.after_plan = self.after_plan, None
        if hook is not None:
            hook()
        return stored


def published(store: MemoryShardStore) -> Bench:
    bench = Bench(build_batch=build_batch, store=store)
    bench.begin("a", "b")
    bench.submit(*group_rows("a"), *group_rows("b"))
    bench.make_batches()
    return bench


def view(cache: BatchViewCache, bench: Bench) -> BatchView:
    answer: BatchView = on_loop(cache.get, bench.run, 0)
    return answer


def ranks(cache: BatchViewCache, bench: Bench) -> int:
    return len(view(cache, bench).picture("policy", None).mini_batches[0].shards)


def test_a_run_that_is_gone_is_not_held_by_its_pictures() -> None:
    cache, bench = BatchViewCache(), published(MemoryShardStore())
    view(cache, bench)
    run = weakref.ref(bench.run._target)
    del bench
    # What the loop did for the run last ends a moment later.
    wait_until(lambda: gc.collect() >= 0 and run() is None)


def test_a_run_of_the_same_name_that_was_recreated_has_pictures_of_its_own() -> None:
    cache, first, second = BatchViewCache(), published(MemoryShardStore()), published(MemoryShardStore())
    assert view(cache, first) is view(cache, first)
    assert view(cache, second) is not view(cache, first)


def test_a_trainer_that_comes_back_with_other_ranks_meanwhile_gets_no_old_picture() -> None:
    store = HookedStore()
    cache, bench = BatchViewCache(), published(store)
    # As in a process that did not publish it, and reads the plan from the store.
    bench.run._builder.plans.clear()
    resuming: list[asyncio.Future[Any]] = []

    def resume() -> None:
        # On the loop, which must not wait for itself.
        again = bench.run._target.resume("policy", Checkpoint(None), "again", dp_size=2)
        resuming.append(asyncio.ensure_future(again))

    store.after_plan = resume
    assert ranks(cache, bench) == 1
    wait_until(lambda: resuming[0].done())
    bench.make_batches()
    assert ranks(cache, bench) == 2
