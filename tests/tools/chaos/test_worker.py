"""A chaos worker that dies and is started again finishes what it began, at moments that campaigns rarely hit."""

from __future__ import annotations

from pathlib import Path

import pytest

from gristmill import RolloutClient
from tests.on_loop import Service
from tests.tools.chaos.campaign import CONFIG
from tests.tools.chaos.contents import Contents
from tests.tools.chaos.kinds import KINDS, PLAIN
from tests.tools.chaos.worker import Worker, WorkerLog

SEED = 7
CONTENTS = Contents(SEED)


@pytest.mark.parametrize("first", [0, 1])
def test_a_worker_that_died_after_it_aborted_a_trajectory_finishes_its_group(
    service: Service, run_name: str, tmp_path: Path, first: int
) -> None:
    """Groups of even and of odd numbers: of one kind it sent the aborted attempt again, which is refused."""
    uids = (f"w0-{index}" for index in range(first, 1000, 2))
    uid = next(uid for uid in uids if CONTENTS.is_aborted(uid, 0) and CONTENTS.steps(uid, 0) > 1)
    with RolloutClient(service.grpc_address, run_name) as client:
        client.create_run(CONFIG | KINDS[PLAIN])

    def started() -> Worker:
        return Worker(service.grpc_address, run_name, SEED, PLAIN, 0, str(tmp_path), tolerant=False)

    started()._trajectory(uid, 0)
    (tmp_path / "stop").touch()
    started().work()
    log = WorkerLog.read(tmp_path / "worker-0.log")
    assert log.done == {uid}
    assert {outcome for *_, outcome in log.rows} == {"ACCEPTED"}
