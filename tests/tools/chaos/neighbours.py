"""Other runs next to the one that trains: some rest with a sealed batch, and one is deleted and recreated while
workers send to it. Whatever happens to that one, or to the service, the others hold what they held."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc

from gristmill import RolloutClient
from gristmill._client.connection.transport import Transport
from gristmill._wire.addresses import Position
from gristmill._wire.codecs.row_codec import decode
from gristmill._wire.codecs.submit_codec import encode
from gristmill._wire.rows import from_rows
from gristmill.errors import FailedPreconditionError, GristmillError, NotFoundError
from gristmill.v1 import run_pb2, trainer_pb2
from tests.rows import make_config, make_row
from tests.tools.chaos.contents import digest
from tests.tools.chaos.rank import effects_of

DELETED = "deleted"
PRODUCERS = RENEWERS = 2
_UNDER_WAY = 24
_ROWS = 2
_TOKENS = 300
_CONFIG = make_config(train_batch_size=_ROWS, policy_mini_batch_size=_ROWS, group_timeout_s=None, step_wise=False)
_TIMEOUT_S = 30.0
_SUBMIT = "/gristmill.v1.RolloutService/SubmitRows"

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
        self._numbers = itertools.count()
        self._hurt: dict[str, str] = {}
        self.findings: list[str] = []
        self.deletions = 0

    def add(self, count: int) -> None:
        """That many more runs, each with a sealed batch."""
        self._resting += [self._create(f"neighbour-{next(self._numbers)}") for _ in range(count)]

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """Meanwhile the oldest of them is checked and deleted, and another made, over and over: they open and close
        files of their own all the time."""
        with _in_threads(RENEWERS, self._renew):
            yield

    def _renew(self, number: int, ended: threading.Event) -> None:
        while not ended.is_set():
            oldest = self._resting.pop(0)
            self._check(oldest)
            name = f"neighbour-{next(self._numbers)}"
            try:
                self._delete(oldest.name)
                self._resting.append(self._create(name))
            except GristmillError as error:
                self._hurt[name] = f"{oldest.name} cannot be deleted, or it cannot be made: {error}"

    def _create(self, name: str) -> Neighbour:
        sent = [self._row(f"{name}-{row}-{self._draw.randrange(1 << 30)}") for row in range(_ROWS)]
        with RolloutClient(self._address, name, timeout_s=_TIMEOUT_S) as client:
            client.create_run(_CONFIG)
            client.submit(sent)
        return Neighbour(name, {row["uid"]: digest([*row["prompt_token_ids"], *row["response_ids"]]) for row in sent})

    def _row(self, uid: str) -> dict[str, Any]:
        prompt = [self._draw.randrange(1, 50_000) for _ in range(_TOKENS)]
        return make_row(uid=uid, prompt=prompt, response=[1])

    # --- Deleting one of them under load

    def delete_under_load(self, seconds: float) -> None:
        """Deletes a run and makes it again over and over, while producers send to it."""
        with _in_threads(PRODUCERS, self._produce):
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                with self._noted("being made"):
                    self._create_deleted()
                    time.sleep(0.005 + 0.05 * self._draw.random())
                with self._noted("being deleted"):
                    self._delete(DELETED)
                    self.deletions += 1
        with self._noted("being resumed"):
            self._check_checkpoint_of_a_deleted_run()

    @contextmanager
    def _noted(self, doing: str) -> Iterator[None]:
        """An error that is the service's own is a finding; others may come of the load."""
        try:
            yield
        except GristmillError as error:
            if error.code == "INTERNAL":
                self.findings.append(f"a run {doing} under load: {error}")

    def _create_deleted(self) -> None:
        with RolloutClient(self._address, DELETED, timeout_s=_TIMEOUT_S) as client:
            client.create_run({**_CONFIG, "train_batch_size": 1 << 16, "policy_mini_batch_size": 1 << 16})

    def _delete(self, run: str) -> None:
        with suppress(NotFoundError):
            self._transport.call(self._transport.runs.DeleteRun, run_pb2.DeleteRunRequest(run=run))

    def _produce(self, number: int, ended: threading.Event) -> None:
        """Sends the same few rows without waiting for answers: the run is there or not, or goes in between."""
        rows = [{**self._row(f"deleted-{number}-{row}"), "prompt_token_ids": [77_777] * _TOKENS} for row in range(4)]
        message = encode(DELETED, [from_rows(rows, step_wise=False)])
        under_way = threading.BoundedSemaphore(_UNDER_WAY)
        # The first address is enough, for all of them pass calls on to the run's owner.
        with grpc.insecure_channel(self._address.split(",")[0]) as channel:
            submit = channel.unary_unary(_SUBMIT)
            while not ended.is_set():
                under_way.acquire()
                submit.future(message, timeout=_TIMEOUT_S).add_done_callback(lambda _: under_way.release())
            for _ in range(_UNDER_WAY):
                under_way.acquire()

    def _check_checkpoint_of_a_deleted_run(self) -> None:
        """A run that was recreated under its name is another one to a checkpoint."""
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
            self.findings.append("a recreated run took a checkpoint of the deleted one")
        self._delete(DELETED)

    # --- What became of the others

    def hurt(self) -> dict[str, str]:
        """The runs that did not hold what they are to hold when they were checked, or do not now, with what is found
        instead."""
        for neighbour in self._resting:
            self._check(neighbour)
        return dict(self._hurt)

    def _check(self, neighbour: Neighbour) -> None:
        wrong = self._wrong_of(neighbour)
        if wrong is not None:
            self._hurt.setdefault(neighbour.name, wrong)

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
        digests: Rows = {}
        request = trainer_pb2.ExportBatchRequest(run=run)
        for part in self._transport.trainers.ExportBatch(request, timeout=_TIMEOUT_S):
            table = decode(part.rows)
            digests |= {uid: digest(row.tolist()) for uid, row in zip(table.uids, table.tokens.arrays(), strict=True)}
        return digests

    def delete_all(self) -> None:
        for neighbour in self._resting:
            self._delete(neighbour.name)
        self._delete(DELETED)

    def close(self) -> None:
        self._transport.close()


@contextmanager
def _in_threads(count: int, work: Callable[[int, threading.Event], None]) -> Iterator[None]:
    """Runs the work in that many threads until the end of the context."""
    ended = threading.Event()
    threads = [threading.Thread(target=work, args=(number, ended)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def wrong_rows(sent: Rows, shard: Rows, exported: Rows) -> str | None:
    """None where a batch has the rows that were sent, and no others."""
    for name, rows in (("its shard", shard), ("its export", exported)):
        if missing := sent.keys() - rows.keys():
            return f"{name} lacks {sorted(missing)}"
        if strange := rows.keys() - sent.keys():
            return f"{name} has {sorted(strange)}, which nobody sent to it"
        if changed := [uid for uid in sent if sent[uid] != rows[uid]]:
            return f"{name} has other tokens of {changed}"
    return None
