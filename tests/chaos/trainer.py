"""The trainer: ranks that start together under one launch, and all start anew when one of them dies."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

from gristmill._wire.addresses import Position
from tests.chaos.heartbeat import Heartbeats
from tests.chaos.ledger import RankLedger, Trained

DP_SIZES = (2, 1)
FIRST_SLOT = 32


class Trainer:
    """kept: per rank of each launch, what took effect and was in a checkpoint that all of its ranks had."""

    def __init__(self, address: str, run: str, directory: Path, draw: random.Random) -> None:
        self._address, self._run, self._directory, self._draw = address, run, directory, draw
        self._heartbeats = Heartbeats(directory / "heartbeats")
        self._log = (directory / "ranks.log").open("a")
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._launches = 0
        self.dp_size = DP_SIZES[0]
        self.kept: list[list[list[Trained]]] = []
        self._next: Position | None = None

    def start(self) -> None:
        self._launches += 1
        self._launch = self._directory / f"launch-{self._launches}"
        self._launch.mkdir()
        for rank in range(self.dp_size):
            self._heartbeats.beat(FIRST_SLOT + rank)
            settings = {
                "address": self._address,
                "run": self._run,
                "rank": rank,
                "dp_size": self.dp_size,
                "launch": f"launch-{self._launches}",
                "start": None if self._next is None else list(self._next),
                "directory": str(self._launch),
                "heartbeats": str(self._directory / "heartbeats"),
                "slot": FIRST_SLOT + rank,
            }
            command = [sys.executable, "-m", "tests.chaos.rank", json.dumps(settings)]
            self._ranks.append(subprocess.Popen(command, stdout=self._log, stderr=self._log))

    def kill_rank(self) -> None:
        os.kill(self._draw.choice(self._ranks).pid, signal.SIGKILL)
        self.restart()

    def resize(self) -> None:
        """Comes back with another number of ranks."""
        self._end()
        self.dp_size = DP_SIZES[(DP_SIZES.index(self.dp_size) + 1) % len(DP_SIZES)]
        self.start()

    def restart(self) -> None:
        self._end()
        self.start()

    def check(self) -> None:
        """Raises where a rank ended by itself with an error."""
        for rank in self._ranks:
            if rank.poll() not in (None, 0):
                raise RuntimeError(f"a rank ended with {rank.returncode}; see {self._log.name}")

    def busy_slots(self) -> list[int]:
        return [FIRST_SLOT + rank for rank, process in enumerate(self._ranks) if process.poll() is None]

    def is_over(self) -> bool:
        return all(rank.poll() == 0 for rank in self._ranks)

    def close(self) -> None:
        self._end()
        self._log.close()

    def _end(self) -> None:
        """What is in no checkpoint of all ranks is forgotten: the weights that had it died."""
        for rank in self._ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()
        if not self._ranks:
            return
        paths = [self._launch / f"rank-{rank}.sqlite" for rank in range(len(self._ranks))]
        self._ranks = []
        if not all(path.exists() for path in paths):
            return
        ledgers = [RankLedger(path) for path in paths]
        places = [ledger.checkpoints() for ledger in ledgers]
        common = set(places[0]).intersection(*places[1:])
        if common:
            newest = max(common)
            self._next = places[0][newest]
            self.kept.append([ledger.trained(newest) for ledger in ledgers])
        for ledger in ledgers:
            ledger.close()
