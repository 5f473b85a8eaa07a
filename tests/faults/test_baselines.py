"""`rae`: running baselines, through kill -9 at any moment and through journals that go back to an older copy.

`KILLS=200 ROLLBACKS=20 pytest tests/faults/test_baselines.py` is the long run.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random

import httpx
import pytest

from tests.api.apis import Json, Refused, row
from tests.faults.services import CONFIG, Service, Services, patiently, uids_of

KILLS, ROLLBACKS = int(os.environ.get("KILLS", "3")), int(os.environ.get("ROLLBACKS", "1"))
AGENTS = ("solver", "judge")
RAE = CONFIG | {
    "advantage_estimator": "rae",
    "rae": {"decay": 0.75},
    "max_buffered_batches": 5000,
    "max_staleness": None,
}


def rows_of(uid: str) -> list[Json]:
    """A group of a solver and a judge, with scores of its own."""
    random = Random(uid)
    return [row(uid, sample, reward=random.random(), agent=AGENTS[sample]) for sample in range(2)]


def undisturbed(uids: Sequence[Sequence[str]]) -> Iterator[dict[str, tuple[float, float]]]:
    """The baselines before and after each of these batches."""
    running = dict.fromkeys(AGENTS, 0.0)
    for batch in uids:
        before = dict(running)
        for uid in batch:
            for one in rows_of(uid):
                running[one["agent"]] = 0.75 * running[one["agent"]] + 0.25 * one["reward"]
        yield {agent: (before[agent], running[agent]) for agent in AGENTS}


class Disturbed:
    """A run on a journal, whose process is killed while groups arrive."""

    def __init__(self, services: Services, directory: Path, run: str, random: Random) -> None:
        self._services, self._run, self._random = services, run, random
        self._journal, self._copy = directory / "journal", directory / "copy"
        (directory / "shards").mkdir()
        self._flags = ["--journal-dir", str(self._journal), "--shared-memory-dir", str(directory / "shards")]
        self.submitted: list[str] = []
        self.service = self._started()
        self.service.grpc.create(run, RAE)

    def _started(self) -> Service:
        [service] = self._services.start(1, *self._flags)
        return service

    def kill(self) -> None:
        """Kills the process while groups are submitted, and starts another, which gets all groups again."""
        timer = threading.Timer(self._random.uniform(0, 0.3), self.service.process.kill)
        timer.start()
        try:
            for _ in range(self._random.randint(1, 8)):
                self.submitted.append(f"g{len(self.submitted)}")
                self.service.grpc.submit(self._run, rows_of(self.submitted[-1]))
        except (Refused, httpx.TransportError):
            pass
        timer.join()
        self.service.process.wait()
        self._restart()

    def keep(self) -> None:
        """Copies the journal, as a snapshot of its disk does."""
        self.service.kill()
        shutil.rmtree(self._copy, ignore_errors=True)
        shutil.copytree(self._journal, self._copy)
        self._restart()

    def roll_back(self) -> None:
        self.service.kill()
        shutil.rmtree(self._journal)
        shutil.copytree(self._copy, self._journal)
        self._restart()

    def _restart(self) -> None:
        self.service.close()
        self.service = self._started()
        groups = patiently(lambda: self.service.grpc.groups(self._run, self.submitted))
        known = {one["uid"] for one in groups if one["state"] != "unknown"}
        for uid in self.submitted[-5:] if known >= set(self.submitted[:-5]) else self.submitted:
            patiently(partial(self.service.grpc.submit, self._run, rows_of(uid)))

    def batches(self) -> list[tuple[list[str], dict[str, tuple[float, float]]]]:
        """The uids of each batch, in order, and the baselines in its plan."""
        batches = []
        for number in range(self.service.grpc.finish(self._run)):
            plan = patiently(partial(self.service.grpc.batch, self._run, number, wait_s=20))["plan"]
            data = patiently(partial(self.service.grpc.read, self._run, number, 0, 0))
            of_agents = {one["agent"]: (one["before"], one["after"]) for one in plan["baselines"]}
            batches.append((list(dict.fromkeys(uids_of(data))), of_agents))
        return batches


@pytest.mark.slow
def test_baselines_are_those_of_an_undisturbed_run(services: Services, tmp_path: Path, run: str) -> None:
    random = Random(27)
    disturbed = Disturbed(services, tmp_path, run, random)
    faults = ["kill"] * KILLS + ["roll back"] * ROLLBACKS
    random.shuffle(faults)
    disturbed.kill()
    disturbed.keep()
    for fault in faults:
        if fault == "kill":
            disturbed.kill()
            continue
        disturbed.roll_back()
        disturbed.kill()
        disturbed.keep()
    batches = disturbed.batches()
    assert sorted(uid for uids, _ in batches for uid in uids) == sorted(disturbed.submitted)
    differing = [
        number
        for number, ((_, planned), expected) in enumerate(
            zip(batches, undisturbed([uids for uids, _ in batches]), strict=True)
        )
        if planned != expected
    ]
    assert not differing, f"of {len(batches)} batches after {KILLS} kills and {ROLLBACKS} rollbacks"
    print(f"{len(batches)} batches, {KILLS} kills, {ROLLBACKS} rollbacks: 0 baselines differ")
