"""A campaign: workers and ranks at work, faults one after another, and the proof at the end."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gristmill import GroupState, RolloutClient
from gristmill._client.connection.transport import Transport
from gristmill.v1 import run_pb2
from tests.tools.chaos.contents import Contents
from tests.tools.chaos.failovers import MODES
from tests.tools.chaos.heartbeat import Heartbeats
from tests.tools.chaos.kinds import KINDS, PLAIN
from tests.tools.chaos.neighbours import Neighbours
from tests.tools.chaos.services import Mode
from tests.tools.chaos.trainer import DP_SIZES, Trainer
from tests.tools.chaos.verify import Failures, Rollback, Verdict, verify
from tests.tools.chaos.worker import WorkerLog

RUN = "chaos"
EPOCHS = 2
WORKERS = 2
NEIGHBOURS = 5
DELETING_S = 0.7
LONGEST_HANG_S = 30.0
CONFIG = {
    "train_batch_size": 8,
    "n_samples_per_prompt": 2,
    "policy_mini_batch_size": 4,
    "update_epochs_per_batch": EPOCHS,
    "micro_batch": {"max_tokens": 128},
    "dp_size": DP_SIZES[0],
    "step_wise": True,
    "max_buffered_batches": 4,
}


@dataclass
class Report:
    mode: str
    kind: str = PLAIN
    seconds: float = 0.0
    longest_outage_s: float = 0.0
    by_kind: Counter[str] = field(default_factory=Counter)
    verdict: Verdict = field(default_factory=Verdict)
    rollbacks: list[Rollback] = field(default_factory=list)
    neighbours_hurt: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    directory: Path = Path()

    @property
    def name(self) -> str:
        return self.mode if self.kind == PLAIN else f"{self.mode}, {self.kind}"

    @property
    def findings(self) -> list[str]:
        return [*self.verdict.findings, *self.neighbours_hurt, *self.left]

    @property
    def is_clean(self) -> bool:
        return not self.findings and self.longest_outage_s <= LONGEST_HANG_S

    def document(self) -> dict[str, Any]:
        verdict = self.verdict
        return {
            "faults": self.by_kind.total(),
            "rows_acknowledged": verdict.rows_acknowledged,
            "lost": len(verdict.lost),
            "trained_twice": len(verdict.trained_twice),
            "out_of_order": len(verdict.out_of_order),
            "skipped": len(verdict.skipped),
            "wrong": len(verdict.wrong),
            "neighbours_hurt": len(self.neighbours_hurt),
            "rollbacks": len(self.rollbacks),
            "rollbacks_reported": sum(rollback.is_reported for rollback in self.rollbacks),
            "rolled_back_and_reported": len(verdict.rolled_back),
            "batches_failed": verdict.batches_failed,
            "rows_lost_and_reported": verdict.rows_reported_lost,
            "left": len(self.left),
            "longest_outage_s": round(self.longest_outage_s, 2),
            "rows_trained": verdict.rows_trained,
            "written_values_trained": verdict.values_trained,
            "groups": dict(verdict.groups),
            "seconds": round(self.seconds, 1),
            "by_kind": dict(self.by_kind),
        }


class Campaign:
    """tell(report, doing): called about ten times per second."""

    def __init__(self, mode: str, kind: str, faults: int, seed: int, tell: Callable[[Report, str], None]) -> None:
        self._faults, self._seed, self._tell = faults, seed, tell
        self._report = Report(mode, kind)
        self._draw = random.Random(f"{seed} {mode}")
        self._workers: list[subprocess.Popen[bytes]] = []
        # Since when, until when, and the run's generation before.
        self._rolled_back: list[tuple[float, float, int]] = []

    def run(self, directory: Path) -> Report:
        """Raises RuntimeError where a process ends that should not, or nothing answers for too long."""
        began = time.monotonic()
        self._report.directory, self._directory = directory, directory
        self._heartbeats = Heartbeats(directory / "heartbeats")
        with ExitStack() as closing:
            mode = MODES[self._report.mode](directory, random.Random(f"{self._seed} times"))
            closing.callback(mode.close)
            mode.start()
            self._address, self._is_tolerant = mode.address, mode.may_roll_back
            with RolloutClient(mode.address, RUN) as client:
                # Groups whose rows are rolled back would otherwise fill the buffer for ever: their workers are done.
                client.create_run(
                    CONFIG | KINDS[self._report.kind] | ({"group_timeout_s": 15.0} if mode.may_roll_back else {})
                )
            closing.callback(self._end_workers)
            for number in range(WORKERS):
                self._workers.append(self._worker(number))
            self._neighbours = Neighbours(mode.address, self._draw)
            closing.callback(self._neighbours.close)
            self._neighbours.add(NEIGHBOURS)
            trainer = Trainer(mode.address, RUN, directory, self._draw)
            closing.callback(trainer.close)
            trainer.start()
            self._await_success(trainer, "starting")
            stopped = threading.Event()
            watching = threading.Thread(target=self._watch, args=(trainer, stopped))
            watching.start()
            closing.callback(watching.join)
            closing.callback(stopped.set)
            for kind, strike in self._schedule(mode, trainer):
                self._check(trainer, kind)
                self._strike(kind, strike, mode, trainer)
                self._work_for(0.1 + 0.5 * self._draw.random(), trainer, "working")
            self._finish(mode, trainer)
        self._report.seconds = time.monotonic() - began
        return self._report

    def _strike(self, kind: str, strike: Callable[[], None], mode: Mode, trainer: Trainer) -> None:
        mode.rolled_back_since, before = None, self._generation() if mode.may_roll_back else 0
        strike()
        self._report.by_kind[kind] += 1
        if mode.rolled_back_since is not None:
            trainer.may_roll_back = True
        self._await_success(trainer, kind)
        if mode.rolled_back_since is not None:
            self._rolled_back.append((mode.rolled_back_since, time.time(), before))

    def _generation(self) -> int:
        with RolloutClient(self._address, RUN) as client:
            return int(client.status().generation)

    def _schedule(self, mode: Mode, trainer: Trainer) -> Iterator[tuple[str, Callable[[], None]]]:
        """Kinds in a random order that has each about as often, and those of `mode.often` more."""
        kinds = mode.faults | {
            "worker killed": self._kill_worker,
            "rank killed": trainer.kill_rank,
            "other dp_size": trainer.resize,
            "older checkpoint": trainer.resume_older,
            "checkpoint ahead": trainer.resume_ahead,
            "neighbour deleted": lambda: self._neighbours.delete_under_load(DELETING_S),
        }
        left: list[str] = []
        for _ in range(self._faults):
            if not left:
                left = sorted([*kinds, *mode.often])
                self._draw.shuffle(left)
            kind = left.pop()
            yield kind, kinds[kind]

    def _worker(self, number: int) -> subprocess.Popen[bytes]:
        settings = {
            "address": self._address,
            "run": RUN,
            "seed": self._seed,
            "kind": self._report.kind,
            "number": number,
            "directory": str(self._directory),
            "tolerant": self._is_tolerant,
        }
        self._heartbeats.beat(number)
        with (self._directory / "workers.log").open("a") as log:
            command = [sys.executable, "-m", "tests.tools.chaos.worker", json.dumps(settings)]
            return subprocess.Popen(command, stdout=log, stderr=log)

    def _kill_worker(self) -> None:
        number = self._draw.randrange(WORKERS)
        self._workers[number].kill()
        self._workers[number].wait()
        self._workers[number] = self._worker(number)

    def _end_workers(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.wait()

    # --- How it goes

    def _await_success(self, trainer: Trainer, doing: str) -> None:
        """Returns when every process had a call that succeeded since the fault: the service is well again."""
        since = time.time()
        while any(self._heartbeats.last(slot) <= since for slot in self._busy(trainer)):
            self._check(trainer, doing)
            time.sleep(0.02)

    def _busy(self, trainer: Trainer) -> list[int]:
        """The slots of processes that have work to do."""
        workers = [number for number, worker in enumerate(self._workers) if worker.poll() is None]
        return workers + trainer.busy_slots()

    def _watch(self, trainer: Trainer, stopped: threading.Event) -> None:
        """Measures, also while a fault is on its way, for how long a process has had no answer."""
        while not stopped.wait(0.02):
            for slot in self._busy(trainer):
                silent = time.time() - self._heartbeats.last(slot)
                self._report.longest_outage_s = max(self._report.longest_outage_s, silent)

    def _work_for(self, seconds: float, trainer: Trainer, doing: str) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._check(trainer, doing)
            time.sleep(0.05)

    def _check(self, trainer: Trainer, doing: str) -> None:
        self._tell(self._report, doing)
        if self._report.longest_outage_s > LONGEST_HANG_S:
            raise RuntimeError(f"{doing}: a process has had no answer for {self._report.longest_outage_s:.0f} s")
        trainer.check()
        for worker in self._workers:
            if worker.poll() not in (None, 0):
                raise RuntimeError(f"a worker ended with {worker.returncode}; see {self._directory}/workers.log")

    # --- The end

    def _finish(self, mode: Mode, trainer: Trainer) -> None:
        (self._directory / "stop").touch()
        self._until(lambda: all(worker.poll() == 0 for worker in self._workers), trainer, "workers finish")
        with RolloutClient(mode.address, RUN) as client:
            client.finish()
            self._until(trainer.is_over, trainer, "trainer finishes")
            trainer.close()
            logs = [WorkerLog.read(self._directory / f"worker-{number}.log") for number in range(WORKERS)]
            asked = client.groups(sorted({uid for log in logs for uid in log.times}))
            groups = [group for group in asked if group.state is not GroupState.UNKNOWN]
            status = client.status()
        self._report.rollbacks = rollbacks_of(self._rolled_back, int(status.generation))
        launches = [launch.effects() for launch in trainer.training]
        stepped_over = [batch for launch in trainer.training for batch in launch.stepped_over()]
        failures = Failures(dict(status.failed_batches), stepped_over, mode.may_fail_batches)
        contents = Contents(self._seed, self._report.kind)
        verdict = verify(contents, EPOCHS, logs, groups, launches, self._report.rollbacks, failures)
        verdict.skipped += trainer.findings
        verdict.wrong += self._neighbours.findings
        self._report.verdict = verdict
        self._report.neighbours_hurt = [f"{name}: {wrong}" for name, wrong in self._neighbours.hurt().items()]
        self._neighbours.delete_all()
        if status.row_bytes or status.shard_bytes:
            self._report.left.append(f"{status.row_bytes} bytes of rows and {status.shard_bytes} of shards are held")
        transport = Transport(mode.address, 20.0, "campaign")
        transport.call(transport.runs.DeleteRun, run_pb2.DeleteRunRequest(run=RUN))
        transport.close()
        self._report.left += mode.left()

    def _until(self, condition: Callable[[], bool], trainer: Trainer, doing: str) -> None:
        while not condition():
            self._check(trainer, doing)
            time.sleep(0.02)


def rollbacks_of(failovers: Sequence[tuple[float, float, int]], generation: int) -> list[Rollback]:
    """found: since when, until when, and the run's generation before, of each in turn. generation: at the end.

    Each that is reported has a growth of its own, at the latest before the next but one: an owner may learn of it after
    it serves again, and the next may come before that.
    """
    rollbacks: list[Rollback] = []
    latest = [*(before for *_, before in failovers[2:]), generation, generation]
    for (since, until, before), reached in reversed(list(zip(failovers, latest, strict=False))):
        generation = min(generation, reached)
        is_reported = generation > before
        generation -= is_reported
        rollbacks.insert(0, Rollback(since, until, is_reported))
    return rollbacks


def run_campaign(
    mode: str,
    faults: int,
    seed: int,
    *,
    kind: str = PLAIN,
    keep: bool = False,
    tell: Callable[[Report, str], None] = lambda *_: None,
) -> Report:
    """The working directory stays where something was wrong, and with `keep`."""
    directory = Path(tempfile.mkdtemp(prefix=f"gristmill-chaos-{mode}-"))
    try:
        report = Campaign(mode, kind, faults, seed, tell).run(directory)
    except KeyboardInterrupt:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    except Exception as error:
        error.add_note(f"its logs are in {directory}")
        raise
    if report.is_clean and not keep:
        shutil.rmtree(directory, ignore_errors=True)
    return report
