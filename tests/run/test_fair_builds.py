"""Runs take turns in having their batches built: one whose batches do not end holds up nobody else's."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import pytest

from gristmill._wire.steps import Steps
from gristmill_service.config import RunConfig
from gristmill_service.monitoring.collectors.run_monitor import Monitor
from gristmill_service.pipeline import BuiltBatch, build_batch
from gristmill_service.run import runs as runs_module
from gristmill_service.storage.memory import MemoryShardStore
from gristmill_service.storage.shard_store import ShardSource
from tests.on_loop import Runs
from tests.run.harness import CONFIG, group_rows, table, wait_until

BATCHES_OF_ONE = CONFIG | {"train_batch_size": 1, "policy_mini_batch_size": 1, "max_buffered_batches": 4}


class Shelf(MemoryShardStore):
    """Takes nothing before it is opened, and remembers in which order batches came."""

    def __init__(self) -> None:
        super().__init__()
        self.opened, self.came = threading.Event(), list[tuple[str, int]]()

    def publish(self, run: str, batch: int, plan: bytes, shards: Iterable[ShardSource], table: bytes = b"") -> int:
        assert self.opened.wait(30)
        self.came.append((run, batch))
        return super().publish(run, batch, plan, shards, table)


def test_where_threads_are_few_a_run_s_next_batch_is_built_behind_another_run_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runs_module, "_BUILDERS", 1)
    shelf = Shelf()
    runs = Runs(shelf, max_row_bytes=1 << 26, make_monitor=Monitor)
    for name, uids in (("greedy", "abc"), ("modest", "a")):
        runs.create(name, BATCHES_OF_ONE)
        for uid in uids:
            runs.get(name).submit(table(*group_rows(uid)))
    shelf.opened.set()
    wait_until(lambda: len(shelf.came) == 4)
    runs.close(30)
    assert [number for name, number in shelf.came if name == "greedy"] == [0, 1, 2]
    # Which run is first depends on when the builder is free.
    assert shelf.came.index(("modest", 0)) < shelf.came.index(("greedy", 1))


def test_a_run_whose_batches_take_long_to_plan_holds_up_neither_other_runs_nor_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runs_module, "_BUILDERS", 2)
    planning, light_is_done = threading.Event(), threading.Event()

    def build(steps: Steps, config: RunConfig, *, run: str, **more: Any) -> BuiltBatch:
        if run == "heavy":
            planning.set()
            # At work all the time, as a plan of very many rows is.
            while not light_is_done.is_set():
                sum(range(1_000))
        return build_batch(steps, config, run=run, **more)

    shelf = Shelf()
    shelf.opened.set()
    runs = Runs(shelf, max_row_bytes=1 << 26, make_monitor=Monitor, build_batch=build)
    for name in ("heavy", "light"):
        runs.create(name, BATCHES_OF_ONE)
    heavy, light = runs.get("heavy"), runs.get("light")
    # More batches than there are builders: a run takes one of these at a time.
    for uid in "abc":
        heavy.submit(table(*group_rows(uid)))
    assert planning.wait(60)
    for uid in "ab":
        light.submit(table(*group_rows(uid)))
    assert heavy.submit(table(*group_rows("d"))), "it is answered itself, too"
    wait_until(lambda: shelf.came == [("light", 0), ("light", 1)])
    light_is_done.set()
    wait_until(lambda: len(shelf.came) == 6)
    runs.close(30)
    assert [number for name, number in shelf.came if name == "heavy"] == [0, 1, 2, 3]
