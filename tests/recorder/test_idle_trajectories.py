"""Trajectories whose agents are gone are aborted, and the other agents notice nothing of it."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

from gristmill.completions import Sampled
from gristmill_recorder.journal import Entry, Journal
from gristmill_recorder.metrics import Metrics
from gristmill_recorder.names import TrajectoryName
from gristmill_recorder.rows import Row
from gristmill_recorder.run import Service
from gristmill_recorder.runs import Runs

AWAY = "127.0.0.1:9"


def test_calls_have_a_turn_after_each_idle_trajectory_that_is_aborted(tmp_path: Path) -> None:
    """After a restart thousands of them may be idle at the same time."""
    step = Row.of(Sampled([1], [2], [-1.0], "stop"), 0, 0, has_logprobs=True, columns={}, is_masked=False)

    async def turns(journal: Journal) -> int:
        runs, count = Runs(Service(AWAY), journal, (), Metrics()), 0
        for number in range(300):
            journal.append(Entry(TrajectoryName("run", f"uid-{number}", 0, 0, 0)), [step], None)
        assert runs.resume() == 300
        aborting = asyncio.create_task(runs.abandon(-1.0))
        while not aborting.done():
            await asyncio.sleep(0)
            count += 1
        await runs.close(0.0)
        assert all(entry.outcome.startswith("aborted") for entry in journal.open())
        return count

    with closing(Journal(tmp_path / "journal.sqlite3")) as journal:
        assert asyncio.run(turns(journal)) >= 300
