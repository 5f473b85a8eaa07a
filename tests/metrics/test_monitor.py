"""A run's monitor: the loop and the builder's thread count at once, and nothing that fails in it reaches the run."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import pytest

from gristmill_service.config import parse_config
from gristmill_service.monitoring.collectors.run_monitor import Monitor
from gristmill_service.pipeline.figures import Figures
from gristmill_service.run.machine.answers import Outcome
from gristmill_service.run.machine.events import Acknowledged, BatchSealed
from gristmill_service.run.machine.state import START, State
from tests.run.harness import CONFIG, group_rows, table

RANKS, TIMES = 4, 2000


@pytest.fixture
def hasty_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def monitored() -> tuple[Monitor, State]:
    return Monitor(time.monotonic, time.monotonic), State.initial(parse_config({**CONFIG, "dp_size": RANKS}))


@pytest.mark.usefixtures("hasty_switches")
def test_nothing_is_lost_between_the_loop_and_the_builders_thread() -> None:
    monitor, state = monitored()
    steps = table(*group_rows("a"))

    def build() -> None:
        for number in range(TIMES):
            monitor.building(number)
            with monitor.timed("merge"):
                monitor.built(number, lambda: Figures(first=0, last=0))

    builder = threading.Thread(target=build)
    builder.start()
    for number in range(TIMES):
        monitor.asked_for_shard(state, "policy", number % RANKS)
        monitor.received([Outcome.ACCEPTED, Outcome.DUPLICATE], steps)
        monitor.gave_shard("policy", number % RANKS, 3)
        monitor.asked_for_groups(found_room=bool(number % 2))
        if number % 100 == 0:
            monitor.metrics.collect(state)
    builder.join()
    counted = {
        (sample.name, *(value for label, value in sample.labels.items() if label != "le")): sample.value
        for metric in monitor.metrics.collect(state)
        for sample in metric.samples
    }
    assert counted["gristmill_rows_total", "accepted"] == counted["gristmill_rows_total", "duplicate"] == TIMES
    assert counted["gristmill_tokens_total", "accepted"] == 3 * TIMES
    assert counted["gristmill_rank_pulled_bytes_total", "policy", "0"] == 3 * TIMES / RANKS
    for stage in ("merge", "queue"):
        assert counted["gristmill_stage_seconds_count", stage] == TIMES


def test_what_goes_wrong_in_it_does_not_reach_the_run() -> None:
    monitor, state = monitored()

    def break_off() -> int:
        raise RuntimeError("it cannot be counted")

    monitor.built(0, break_off)  # type: ignore[arg-type]
    # Neither that batch nor that rank exists.
    monitor.applied(BatchSealed(7, (), 0), state, 1, break_off)
    monitor.applied(Acknowledged("policy", 99, START), state, 0, lambda: 0)
    monitor.received([Outcome.ACCEPTED, Outcome.SEALED], table())
    assert monitor.history.batches[7].sealed is not None, "the history is noted all the same"
