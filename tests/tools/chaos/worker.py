"""A rollout worker that may die at any moment: it writes down what was acknowledged, and goes on from that.

    python -m tests.tools.chaos.worker '{"address": ..., ...}'

Its log has a line per event, which begins with the time: `begin UID SAMPLE ATTEMPT`, `row UID SAMPLE STEP ATTEMPT
OUTCOME`, `done UID`, `failed UID REASON`. A store that goes back in time takes groups with it that a worker is at: it
gives those up, and goes on with others, where it is started as `tolerant`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gristmill import GristmillError, RolloutClient
from tests.tools.chaos.contents import ABORT_REASON, SAMPLES, Contents
from tests.tools.chaos.heartbeat import Heartbeats

_AT_ONCE = 4


@dataclass
class WorkerLog:
    """attempts: the last attempt begun at each trajectory. done: groups that were handed over whole. failed: groups
    that were given up. times: when something happened to each group."""

    path: Path
    attempts: dict[tuple[str, int], int] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    rows: list[tuple[str, int, int, int, str]] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)
    times: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> WorkerLog:
        log = cls(path)
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        for line in lines:
            at, *event = line.split()
            log.times.setdefault(event[1], []).append(float(at))
            match event:
                case ["begin", uid, sample, attempt]:
                    log.attempts[uid, int(sample)] = int(attempt)
                case ["row", uid, sample, step, attempt, outcome]:
                    log.rows.append((uid, int(sample), int(step), int(attempt), outcome))
                case ["done", uid]:
                    log.done.add(uid)
                case ["failed", uid, *_]:
                    log.failed.add(uid)
        return log

    def write(self, *words: object) -> None:
        with self.path.open("a") as file:
            file.write(" ".join(map(str, (time.time(), *words))) + "\n")


class Worker:
    def __init__(
        self, address: str, run: str, seed: int, kind: str, number: int, directory: str, tolerant: bool
    ) -> None:
        self._client = RolloutClient(address, run, timeout_s=60)
        self._contents, self._number, self._directory = Contents(seed, kind), number, Path(directory)
        self._log = WorkerLog.read(self._directory / f"worker-{number}.log")
        self._heartbeats = Heartbeats(self._directory / "heartbeats")
        self._failures: tuple[type[Exception], ...] = (GristmillError,) if tolerant else ()

    def work(self) -> None:
        begun = {uid for uid, _ in self._log.attempts} - self._log.done - self._log.failed
        for uid in sorted(begun, key=_index):
            self._group(uid)
        waiting: list[str] = []
        fresh = self._fresh()
        while not (self._directory / "stop").exists():
            while len(waiting) < _AT_ONCE:
                waiting.append(next(fresh))
            admitted = self._client.begin_groups(waiting, wait_s=1.0)
            self._heartbeats.beat(self._number)
            for uid in admitted:
                waiting.remove(uid)
                self._group(uid)
        self._client.close()

    def _fresh(self) -> Iterator[str]:
        known = {uid for uid, _ in self._log.attempts} | self._log.done
        index = max(map(_index, known), default=-1) + 1
        while True:
            yield f"w{self._number}-{index}"
            index += 1

    def _group(self, uid: str) -> None:
        try:
            for sample in range(SAMPLES):
                self._trajectory(uid, sample)
        except self._failures as error:
            self._log.write("failed", uid, type(error).__name__)
        else:
            self._log.write("done", uid)

    def _trajectory(self, uid: str, sample: int) -> None:
        before = self._log.attempts.get((uid, sample))
        is_aborted = self._contents.is_aborted(uid, sample)
        # A restarted worker sends the same tokens again, or others under a higher attempt; always a higher one if it
        # may have aborted the trajectory before it died, because the service refuses the aborted attempt.
        attempt = 0 if before is None else before + (is_aborted or (before + sample + _index(uid)) % 2)
        self._log.write("begin", uid, sample, attempt)
        rows = self._contents.rows(uid, sample, attempt)
        for row in rows[:-1] if is_aborted else rows:
            [outcome] = self._client.submit([row])
            self._log.write("row", uid, sample, row["step"], attempt, outcome.name)
            self._heartbeats.beat(self._number)
        if is_aborted:
            self._client.abort_trajectory(uid, sample, reason=ABORT_REASON)
        elif self._contents.is_rewarded_late(uid, sample):
            step = self._contents.steps(uid, sample) - 1
            self._client.set_reward(uid, sample, self._contents.reward(uid, sample, step))
        self._heartbeats.beat(self._number)


def _index(uid: str) -> int:
    return int(uid.rpartition("-")[2])


def main() -> None:
    try:
        Worker(**json.loads(sys.argv[1])).work()
    except GristmillError as error:
        sys.exit(f"worker: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
