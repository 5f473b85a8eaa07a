"""The views of batches that are cached: they hold no run, and are never of another run or of other ranks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

from gristmill_service.monitoring.views.batch_view import BatchViewCache
from gristmill_service.pipeline import build_batch
from gristmill_service.run.machine.commands.trainer_commands import Checkpoint
from gristmill_service.storage.memory_shards import MemoryShardStore
from tests.run.harness import Bench, group_rows


class HookedStore(MemoryShardStore):
    """Calls `after_plan` once, when a plan was read."""

    def __init__(self) -> None:
        super().__init__()
        self.after_plan: Callable[[], object] | None = None

    def plan(self, run: str, batch: int) -> bytes:
        found = super().plan(run, batch)
        hook, self.after_plan = self.after_plan, None
        if hook is not None:
            hook()
        return found


def published(store: MemoryShardStore) -> Bench:
    bench = Bench(build_batch=build_batch, store=store)
    bench.begin("a", "b")
    bench.submit(*group_rows("a"), *group_rows("b"))
    bench.make_batches()
    return bench


def ranks(cache: BatchViewCache, bench: Bench) -> int:
    return len(cache.get(bench.run, 0).picture("policy", None).mini_batches[0].shards)


def test_a_run_that_is_gone_is_not_held_by_its_pictures() -> None:
    cache, bench = BatchViewCache(), published(MemoryShardStore())
    cache.get(bench.run, 0)
    run = weakref.ref(bench.run)
    del bench
    gc.collect()
    assert run() is None


def test_a_run_of_the_same_name_that_was_made_anew_has_pictures_of_its_own() -> None:
    cache, first, second = BatchViewCache(), published(MemoryShardStore()), published(MemoryShardStore())
    assert cache.get(first.run, 0) is cache.cached(first.run, 0)
    assert cache.cached(second.run, 0) is None


def test_a_trainer_that_comes_back_with_other_ranks_meanwhile_gets_no_old_picture() -> None:
    store = HookedStore()
    cache, bench = BatchViewCache(), published(store)
    # As in a process that did not publish it, and reads the plan from the store.
    bench.run._builder.plans.clear()
    store.after_plan = lambda: bench.run.resume("policy", Checkpoint(None), "again", dp_size=2)
    assert ranks(cache, bench) == 1
    bench.make_batches()
    assert ranks(cache, bench) == 2
