"""Other runs beside the one that trains: some rest with a batch that is sealed, and one is deleted and made again while
workers send to it. Whatever happens to that one, or to the service, the others hold what they held."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from gristmill import RolloutClient
from gristmill._client.transport import Transport
from gristmill._wire.addresses import Position
from gristmill._wire.row_codec import decode
from gristmill.errors import FailedPreconditionError, GristmillError
from gristmill.v1 import run_pb2, trainer_pb2
from tests.chaos.contents import digest
from tests.chaos.rank import effects_of

DELETED = "deleted"
PRODUCERS = 2
_ROWS = 2
_TOKENS = 300
_CONFIG = {
    "train_batch_size": _ROWS,
    "n_samples_per_prompt": 1,
    "policy_mini_batch_size": _ROWS,
    "micro_batch": {"size": 1},
    "group_timeout_s": None,
}
_TIMEOUT_S = 30.0

Rows = dict[str, str]
"""The digest of the tokens of each group's one row."""


@dataclass(frozen=True)
class Neighbour:
    """A run that holds one sealed batch."""

    name: str
    rows: Rows


class Neighbours:
    """findings: what the service did wrong to any of them. deletions: how often one was deleted under load."""

    def __init__(self, address: str, draw: random.Random) -> None:
        self._address, self._draw = address, draw
        self._transport = Transport(address, _TIMEOUT_S, "neighbours")
        self._resting: list[Neighbour] = []
        self.findings: list[str] = []
        self.deletions = 0

    def add(self, count: int) -> None:
        """So many more that hold a batch."""
        for number in range(len(self._resting), len(self._resting) + count):
            name = f"neighbour-{number}"
            sent = [self._row(f"{name}-{row}") for row in range(_ROWS)]
            with RolloutClient(self._address, name, timeout_s=_TIMEOUT_S) as client:
                client.create_run(_CONFIG)
                client.submit_rows(sent)
            tokens = {row["uid"]: digest([*row["prompt_token_ids"], *row["response_ids"]]) for row in sent}
            self._resting.append(Neighbour(name, tokens))

    def _row(self, uid: str) -> dict[str, Any]:
        prompt = [self._draw.randrange(1, 50_000) for _ in range(_TOKENS)]
        return {
            "uid": uid,
            "sample": 0,
            "prompt_token_ids": prompt,
            "response_ids": [1],
            "loss_mask": [1],
            "reward": 1.0,
        }

    # --- Deleting one of them under load

    def delete_under_load(self, seconds: float) -> None:
        """Deletes a run and makes it again over and over, while producers send to it."""
        with self._producing():
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                with suppress(GristmillError):
                    self._create_deleted()
                    time.sleep(0.005 + 0.05 * self._draw.random())
                with suppress(GristmillError):
                    self._delete(DELETED)
                    self.deletions += 1
        self._check_checkpoint_of_a_deleted_run()

    def _create_deleted(self) -> None:
        with RolloutClient(self._address, DELETED, timeout_s=_TIMEOUT_S) as client:
            client.create_run({**_CONFIG, "train_batch_size": 1 << 16, "policy_mini_batch_size": 1 << 16})

    def _delete(self, run: str) -> None:
        with suppress(GristmillError):
            self._transport.call(self._transport.runs.DeleteRun, run_pb2.DeleteRunRequest(run=run))

    @contextmanager
    def _producing(self) -> Iterator[None]:
        ended = threading.Event()
        threads = [threading.Thread(target=self._produce, args=(number, ended)) for number in range(PRODUCERS)]
        for thread in threads:
            thread.start()
        yield
        ended.set()
        for thread in threads:
            thread.join()

    def _produce(self, number: int, ended: threading.Event) -> None:
        rows = [{**self._row(f"deleted-{number}-{row}"), "prompt_token_ids": [77_777] * _TOKENS} for row in range(64)]
        with RolloutClient(self._address, DELETED, timeout_s=1.0) as client:
            while not ended.is_set():
                for row in rows:
                    # The run is there or not, or goes in between: any of that is as it should be.
                    with suppress(GristmillError):
                        client.submit_rows([row])
                    if ended.is_set():
                        break

    def _check_checkpoint_of_a_deleted_run(self) -> None:
        """A run that was made again under its name is another one to a checkpoint."""
        self._delete(DELETED)
        self._create_deleted()
        resumed = self._transport.call(
            self._transport.trainers.Resume, trainer_pb2.ResumeRequest(run=DELETED, launch="first")
        )
        self._delete(DELETED)
        self._create_deleted()
        asked = trainer_pb2.ResumeRequest(
            run=DELETED,
            launch="second",
            position=Position(0).message(),
            run_id=resumed.run_id or "of the deleted run",
            generation=resumed.generation,
        )
        try:
            self._transport.call(self._transport.trainers.Resume, asked)
        except FailedPreconditionError:
            pass
        else:
            self.findings.append("a run that was made again took a checkpoint of the deleted one")
        self._delete(DELETED)

    # --- What became of the others

    def hurt(self) -> list[str]:
        """The runs that do not hold what they held, with what is found instead."""
        return [
            f"{neighbour.name}: {wrong}"
            for neighbour in self._resting
            if (wrong := self._wrong_of(neighbour)) is not None
        ]

    def _wrong_of(self, neighbour: Neighbour) -> str | None:
        try:
            shard, exported = self._shard_of(neighbour.name), self._export_of(neighbour.name)
        except Exception as error:  # noqa: BLE001 - whatever it cannot be read for, it is hurt
            return f"{type(error).__name__}: {error}"
        return wrong_rows(neighbour.rows, shard, exported)

    def _shard_of(self, run: str) -> Rows:
        """Waits for the batch, which a service that was started again may have to make first."""
        deadline = time.monotonic() + _TIMEOUT_S
        wanted = trainer_pb2.GetBatchRequest(run=run, wait_s=1.0)
        while True:
            answer = self._transport.call(self._transport.trainers.GetBatch, wanted, wait_s=1.0)
            if answer.state == trainer_pb2.BATCH_STATE_PUBLISHED:
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"the batch is not there after {_TIMEOUT_S:.0f} s")
        request = trainer_pb2.ReadShardRequest(run=run)
        data = b"".join(piece.data for piece in self._transport.trainers.ReadShard(request, timeout=_TIMEOUT_S))
        return {effect.uid: effect.digest for effect in effects_of(data)}

    def _export_of(self, run: str) -> Rows:
        found: Rows = {}
        request = trainer_pb2.ExportBatchRequest(run=run)
        for part in self._transport.trainers.ExportBatch(request, timeout=_TIMEOUT_S):
            table = decode(part.rows)
            found |= {uid: digest(row.tolist()) for uid, row in zip(table.uids, table.tokens.arrays(), strict=True)}
        return found

    def delete_all(self) -> None:
        for neighbour in self._resting:
            self._delete(neighbour.name)
        self._delete(DELETED)

    def close(self) -> None:
        self._transport.close()


def wrong_rows(sent: Rows, shard: Rows, exported: Rows) -> str | None:
    """None where a batch has the rows that were sent, and no others."""
    for name, found in (("its shard", shard), ("its export", exported)):
        if missing := sent.keys() - found.keys():
            return f"{name} lacks {sorted(missing)}"
        if strange := found.keys() - sent.keys():
            return f"{name} has {sorted(strange)}, which nobody sent to it"
        if changed := [uid for uid in sent if sent[uid] != found[uid]]:
            return f"{name} has other tokens of {changed}"
    return None
