"""A rank's durable log: positions and what was trained there, and the batches that it stepped over, written in one
transaction, as a checkpoint is."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gristmill._wire.addresses import Position


class Effect(NamedTuple):
    """One row that took effect: steps first..last of a trajectory. digest: of its tokens. trained: how many of them the
    loss takes. reward: the sum over its tokens. Where the run has columns: their digest, the launch that wrote some of
    them, and the sum of the advantages that its trained tokens have of these."""

    uid: str
    sample: int
    first: int
    last: int
    digest: str
    trained: int
    reward: float
    columns: str = ""
    launch: int = 0
    advantage: float = 0.0


class Trained(NamedTuple):
    position: Position
    effects: Sequence[Effect]


class RankLog:
    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path, isolation_level=None)
        self._database.execute("PRAGMA synchronous = OFF")
        self._database.execute(
            "CREATE TABLE IF NOT EXISTS checkpoints (number INTEGER PRIMARY KEY, b, e, m, generation)"
        )
        self._database.execute(f"CREATE TABLE IF NOT EXISTS steps (number, b, e, m, {', '.join(Effect._fields)})")
        self._database.execute("CREATE TABLE IF NOT EXISTS stepped_over (number, batch)")

    def save(
        self,
        number: int,
        next_position: Position,
        generation: int,
        trained: Sequence[Trained],
        stepped_over: Sequence[int] = (),
    ) -> None:
        self._database.execute("BEGIN")
        for position, effects in trained:
            # A mini-batch of padding rows alone has a line, too.
            for effect in effects or [Effect("", 0, 0, 0, "", 0, 0.0)]:
                line = (number, *position, *effect)
                self._database.execute(f"INSERT INTO steps VALUES ({','.join('?' * len(line))})", line)
        self._database.executemany("INSERT INTO stepped_over VALUES (?,?)", [(number, batch) for batch in stepped_over])
        self._database.execute("INSERT INTO checkpoints VALUES (?,?,?,?,?)", (number, *next_position, generation))
        self._database.execute("COMMIT")

    def checkpoints(self) -> dict[int, Position]:
        """The next position at each checkpoint."""
        rows = self._database.execute("SELECT number, b, e, m FROM checkpoints")
        return {number: Position(*place) for number, *place in rows}

    def generation(self, number: int) -> int:
        """The run's generation, as the rank had last heard of it at a checkpoint."""
        rows = self._database.execute("SELECT generation FROM checkpoints WHERE number = ?", (number,))
        return int(rows.fetchone()[0])

    def trained(self, up_to: int) -> list[Trained]:
        """Returns what took effect up to a checkpoint, in order."""
        steps: list[Trained] = []
        lines = self._database.execute("SELECT * FROM steps WHERE number <= ? ORDER BY rowid", (up_to,))
        for _, b, e, m, *effect in lines:
            position = Position(b, e, m)
            if not steps or steps[-1].position != position:
                steps.append(Trained(position, []))
            if effect[0]:
                steps[-1] = Trained(position, [*steps[-1].effects, Effect(*effect)])
        return steps

    def stepped_over(self, up_to: int) -> list[int]:
        """Returns the failed batches that were left out up to a checkpoint, in order."""
        lines = self._database.execute("SELECT batch FROM stepped_over WHERE number <= ? ORDER BY rowid", (up_to,))
        return [int(batch) for (batch,) in lines]

    def close(self) -> None:
        self._database.close()
