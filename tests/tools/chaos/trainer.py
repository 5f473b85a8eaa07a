"""The trainer: ranks that start together under one launch, and all restart when one of them dies."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from gristmill._client.connection.transport import Transport
from gristmill._wire.addresses import Position
from gristmill.errors import BatchFailedError, FailedPreconditionError
from gristmill.v1 import run_pb2, trainer_pb2
from tests.tools.chaos.heartbeat import Heartbeats
from tests.tools.chaos.rank import FAILED
from tests.tools.chaos.rank_log import RankLog, Trained

DP_SIZES = (2, 1)
FIRST_SLOT = 32
_MOST_AHEAD = 2
"""Batches by which a checkpoint is ahead that must be refused."""


@dataclass(frozen=True)
class Launch:
    """One that has ended, up to a checkpoint that all of its ranks have; what came after it is forgotten, for the
    weights that had it died. run_id: of the run."""

    directory: Path
    ranks: int
    run_id: str
    up_to: int = 0

    @cached_property
    def checkpoints(self) -> dict[int, Position]:
        """The next position at each checkpoint that all ranks have."""
        paths = [self._path(rank) for rank in range(self.ranks)]
        if not all(path.exists() for path in paths):
            return {}
        by_rank = []
        for path in paths:
            with closing(RankLog(path)) as log:
                by_rank.append(log.checkpoints())
        return {number: place for number, place in by_rank[0].items() if all(number in other for other in by_rank[1:])}

    @property
    def next(self) -> Position:
        return self.checkpoints[self.up_to]

    @property
    def generation(self) -> int:
        """The run's generation that the checkpoint is of, as its ranks heard of it."""
        generations = []
        for rank in range(self.ranks):
            with closing(RankLog(self._path(rank))) as log:
                generations.append(log.generation(self.up_to))
        return max(generations)

    def effects(self) -> list[list[Trained]]:
        """Returns what took effect, of each rank."""
        by_rank = []
        for rank in range(self.ranks):
            with closing(RankLog(self._path(rank))) as log:
                by_rank.append(log.trained(self.up_to))
        return by_rank

    def stepped_over(self) -> list[int]:
        """Returns the failed batches that its ranks left out, all of them the same."""
        with closing(RankLog(self._path(0))) as log:
            return log.stepped_over(self.up_to)

    def _path(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.sqlite"


Training = tuple[Launch, ...]


def before(training: Training) -> Training:
    """The training as it was at the checkpoint before its last one; nothing where there is none."""
    *earlier, last = training
    older = [number for number in last.checkpoints if number < last.up_to]
    return (*earlier, replace(last, up_to=max(older))) if older else tuple(earlier)


class Trainer:
    """may_roll_back: whether the service may have lost what the newest checkpoint has, so that an older one is tried.

    training: of each launch, what took effect. findings: resumes that the service had to refuse, and took."""

    def __init__(self, address: str, run: str, directory: Path, draw: random.Random) -> None:
        self._address, self._run, self._directory, self._draw = address, run, directory, draw
        self.may_roll_back = False
        self._heartbeats = Heartbeats(directory / "heartbeats")
        self._log = (directory / "ranks.log").open("a")
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._transport = Transport(address, 60.0, "trainer")
        self._launches = 0
        self.dp_size = DP_SIZES[0]
        self.training: Training = ()
        self._furthest = Position(0)
        self.findings: list[str] = []

    def start(self) -> None:
        """From the newest checkpoint; where the service may have lost what that has, from the newest that it takes."""
        newest = self.training
        try:
            self._start(newest)
        except FailedPreconditionError:
            if not (self.may_roll_back and newest):
                raise
            self._start_from_what_is_left(newest)

    def _start_from_what_is_left(self, newest: Training) -> None:
        # What the log still has may be further than the checkpoint that is gone on from.
        self._furthest = max(self._acknowledged())
        training = before(newest)
        while training:
            try:
                self._start(training)
            except FailedPreconditionError:
                training = before(training)
            else:
                return
        # The service says where it is; the checkpoint of that place is what the weights have to be of.
        start, training = self._start(()), newest
        while training and training[-1].next != start:
            training = before(training)
        self.training = training

    def _start(self, training: Training) -> Position:
        """Returns from where."""
        self._launches += 1
        resumed = self._resume(training[-1].next if training else None, training)
        self.training, start = training, Position.of(resumed.position)
        directory = self._directory / f"launch-{self._launches}"
        directory.mkdir()
        self._launch = Launch(directory, self.dp_size, resumed.run_id)
        failed = sorted(self._status().failed_batches)
        self._ranks = [self._rank(rank, start, failed) for rank in range(self.dp_size)]
        return start

    def _rank(self, rank: int, start: Position, failed: list[int]) -> subprocess.Popen[bytes]:
        self._heartbeats.beat(FIRST_SLOT + rank)
        settings = {
            "address": self._address,
            "run": self._run,
            "rank": rank,
            "dp_size": self.dp_size,
            "launch": f"launch-{self._launches}",
            "start": list(start),
            "failed": failed,
            "directory": str(self._launch.directory),
            "heartbeats": str(self._directory / "heartbeats"),
            "slot": FIRST_SLOT + rank,
        }
        command = [sys.executable, "-m", "tests.tools.chaos.rank", json.dumps(settings)]
        return subprocess.Popen(command, stdout=self._log, stderr=self._log)

    def _resume(self, position: Position | None, training: Training) -> trainer_pb2.ResumeResponse:
        """Raises FailedPreconditionError where the service refuses a checkpoint of the training at the position."""
        last = training[-1] if training else None
        request = trainer_pb2.ResumeRequest(
            run=self._run,
            launch=f"launch-{self._launches}",
            dp_size=self.dp_size,
            position=None if position is None else position.message(),
            run_id=last.run_id if last else "",
            generation=last.generation if last else 0,
        )
        answer: trainer_pb2.ResumeResponse = self._transport.call(self._transport.trainers.Resume, request)
        return answer

    # --- Faults

    def kill_rank(self) -> None:
        os.kill(self._draw.choice(self._ranks).pid, signal.SIGKILL)
        self.restart()

    def resize(self) -> None:
        """Comes back with another number of ranks."""
        self._end()
        self.dp_size = DP_SIZES[(DP_SIZES.index(self.dp_size) + 1) % len(DP_SIZES)]
        self.start()

    def resume_ahead(self) -> None:
        """Tries to go on ahead of what was acknowledged, which would skip accepted rows without a word."""
        self._end()
        reached = self._reached_at_most()
        for batches in range(1, _MOST_AHEAD + 1):
            self._launches += 1
            ahead = Position(reached.batch + batches)
            try:
                self._resume(ahead, self.training)
            except FailedPreconditionError:
                continue
            if self._status().failed_batches.keys() >= set(range(reached.batch, ahead.batch)):
                continue
            self.findings.append(f"resumed at {ahead} where nothing from {reached} on was acknowledged")
        self.start()

    def resume_older(self) -> None:
        """Goes on from an older checkpoint, where the service still has what was trained after it, and trains that
        again; else from the newest."""
        self._end()
        older = before(self.training) if self.training else ()
        if not older:
            return self.start()
        try:
            self._start(older)
        except FailedPreconditionError:
            self.start()
        return None

    def restart(self) -> None:
        self._end()
        self.start()

    # --- How it goes

    def check(self) -> None:
        """Restarts where a rank ended because a batch has failed, which the proof judges, or with an error because
        the service has lost what it had; else raises."""
        for rank in self._ranks:
            if rank.poll() not in (None, 0):
                if rank.returncode != FAILED and not self.may_roll_back:
                    raise RuntimeError(f"a rank ended with {rank.returncode}; see {self._log.name}")
                self.restart()
                return

    def busy_slots(self) -> list[int]:
        return [FIRST_SLOT + rank for rank, process in enumerate(self._ranks) if process.poll() is None]

    def is_over(self) -> bool:
        return all(rank.poll() == 0 for rank in self._ranks)

    def close(self) -> None:
        self._end()
        self._log.close()
        self._transport.close()

    def _end(self) -> None:
        for rank in self._ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()
        if self._ranks:
            self._furthest = max([self._furthest, *self._acknowledged()])
            if self._launch.checkpoints:
                self.training = (*self.training, replace(self._launch, up_to=max(self._launch.checkpoints)))
        self._ranks = []

    def _reached_at_most(self) -> Position:
        """A rank that was killed while it acknowledged a batch's last step may yet be found to have done so."""
        furthest = self._furthest
        request = trainer_pb2.GetBatchRequest(run=self._run, batch=furthest.batch)
        try:
            answer: trainer_pb2.GetBatchResponse = self._transport.call(self._transport.trainers.GetBatch, request)
        except BatchFailedError:
            return furthest
        if answer.state != trainer_pb2.BATCH_STATE_PUBLISHED:
            return furthest
        count = sum(part["model"] == "policy" for part in json.loads(answer.plan_json)["mini_batches"])
        epochs = json.loads(self._status().resolved_config_json)["update_epochs_per_batch"]
        return Position(furthest.batch + 1) if furthest[1:] == (epochs - 1, count - 1) else furthest

    def _acknowledged(self) -> list[Position]:
        """Asks the service what each rank has to acknowledge next."""
        return [Position.of(rank.next) for rank in self._status().ranks]

    def _status(self) -> run_pb2.RunStatus:
        answer: run_pb2.GetRunResponse = self._transport.call(
            self._transport.runs.GetRun, run_pb2.GetRunRequest(run=self._run)
        )
        return answer.status
