"""A run's monitor: many threads count at once, and nothing that goes wrong in it reaches the run."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import pytest

from gristmill_service.config import parse_config
from gristmill_service.monitoring.collectors.run_monitor import Monitor
from gristmill_service.run.machine.answers import Outcome
from gristmill_service.run.machine.events import Acknowledged, BatchSealed
from gristmill_service.run.machine.state import START, State
from tests.run.harness import CONFIG, group_rows, table

THREADS, TIMES = 4, 500


@pytest.fixture
def hasty_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def monitored() -> tuple[Monitor, State]:
    return Monitor(time.monotonic, time.monotonic), State.initial(parse_config(CONFIG))


@pytest.mark.usefixtures("hasty_switches")
def test_nothing_is_lost_between_threads_while_it_is_read() -> None:
    monitor, state = monitored()
    monitor.asked_for_shard(state, "policy", 0)
    steps = table(*group_rows("a"))

    def count(thread: int) -> None:
        for number in range(TIMES):
            monitor.received([Outcome.ACCEPTED, Outcome.DUPLICATE], steps)
            monitor.gave_shard("policy", 0, 3)
            monitor.building(thread * TIMES + number)
            with monitor.timed("merge"):
                pass

    threads = [threading.Thread(target=count, args=(thread,)) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        found = monitor.metrics.snapshot(state)
        # A request counts whole.
        assert found.rows[Outcome.ACCEPTED] == found.rows[Outcome.DUPLICATE]
        assert found.ranks[0].nbytes == 3 * found.ranks[0].pulls
    found = monitor.metrics.snapshot(state)
    every = THREADS * TIMES
    assert (found.rows[Outcome.ACCEPTED], found.tokens[Outcome.ACCEPTED]) == (every, 3 * every)
    assert found.ranks[0].pulls == every
    assert [found.stages[stage].up_to()[-1][1] for stage in ("merge", "queue")] == [every, every]


def test_what_goes_wrong_in_it_does_not_reach_the_run() -> None:
    monitor, state = monitored()

    def break_off() -> int:
        raise RuntimeError("it cannot be counted")

    monitor.built(0, break_off)  # type: ignore[arg-type]
    # Neither that batch nor that rank exists.
    monitor.applied(BatchSealed(7, (), 0), state, 1, break_off)
    monitor.applied(Acknowledged("policy", 99, START), state, 0, lambda: 0)
    monitor.received([Outcome.ACCEPTED, Outcome.SEALED], table())
    assert monitor.history.snapshot(state).batches[7].sealed is not None, "the history is noted all the same"
