"""What a recorder knows of a run holds only as long as the service answers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gristmill import UnavailableError
from gristmill_recorder.metrics import Metrics
from gristmill_recorder.refusals import WrongCall
from gristmill_recorder.runs import Run

CONFIG = {"step_wise": True, "columns": [], "n_samples_per_prompt": 1, "max_samples_per_prompt": None, "surplus": 0}


class RestartedService:
    """A client of a run with one sample, whose service stops answering when `stopped` is set."""

    def __init__(self) -> None:
        self.stopped = asyncio.Event()

    async def status(self) -> Any:
        return SimpleNamespace(run="run", run_id="1", generation=0, rows_accepted=0, policy_version=0, config=CONFIG)

    async def wait_policy_version(self, version: int, wait_s: float) -> int:
        await self.stopped.wait()
        raise UnavailableError("the service stopped")

    async def close(self) -> None:
        pass


def test_samples_are_not_refused_by_the_settings_of_a_run_from_before_the_service_was_away() -> None:
    async def work() -> None:
        client: Any = RestartedService()
        run = Run("run", client, (), Metrics())
        await run.check(0)
        with pytest.raises(WrongCall, match=r"sample 1 is not in 0\.\.0"):
            await run.check(1)
        client.stopped.set()
        # The task that waits for the next version learns it.
        await asyncio.sleep(0.1)
        await run.check(1)
        await run.close()

    asyncio.run(work())
