"""Trajectories whose agents are gone are aborted, and the other agents notice nothing of it."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from pathlib import Path

from gristmill.completions import Sampled
from gristmill_recorder.journal import Entry, Journal
from gristmill_recorder.metrics import Metrics
from gristmill_recorder.names import TrajectoryName
from gristmill_recorder.rows import Row
from gristmill_recorder.runs import Runs

AWAY = "127.0.0.1:9"


def test_calls_do_not_wait_while_thousands_of_idle_trajectories_are_aborted(tmp_path: Path) -> None:
    """After a restart all of them are idle at the same time."""
    step = Row.of(Sampled([1], [2], [-1.0], "stop"), 0, 0, has_logprobs=True, columns={}, is_masked=False)

    async def longest_wait_s(journal: Journal) -> float:
        """Returns how much processor time passed at most between two turns of another task."""
        runs = Runs(AWAY, journal, (), Metrics())
        for number in range(3000):
            journal.append(Entry(TrajectoryName("run", f"uid-{number}", 0, 0, 0)), [step], None)
        assert runs.resume() == 3000
        aborting, longest_s = asyncio.create_task(runs.abandon(-1.0)), 0.0
        while not aborting.done():
            began = time.thread_time()
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.thread_time() - began)
        await runs.close(0.0)
        assert all(entry.outcome.startswith("aborted") for entry in journal.open())
        return longest_s

    with closing(Journal(tmp_path / "journal.sqlite3")) as journal:
        assert asyncio.run(longest_wait_s(journal)) < 1.0
