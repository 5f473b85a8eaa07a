"""A data-parallel rank without torch: it pulls its shards in order, and writes down what they were. Where a batch waits
for columns, it writes those of its forward shards before.

It steps over the batches that had failed when it was started, as `TrainerClient.load_state_dict` does. One that fails
later ends it, with the exit status FAILED: all ranks restart, and agree on what they step over.

python -m tests.tools.chaos.rank '{"address": ..., ...}'
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from gristmill._client.connection.failures import failure_of
from gristmill._client.connection.transport import Transport
from gristmill._wire.addresses import Position
from gristmill._wire.codecs.zstd_frames import FRAME_BYTES, decompressed
from gristmill.errors import BatchFailedError, GristmillError
from gristmill.v1 import run_pb2, trainer_pb2
from tests.tools.chaos import written
from tests.tools.chaos.contents import digest
from tests.tools.chaos.heartbeat import Heartbeats
from tests.tools.chaos.kinds import WRITTEN
from tests.tools.chaos.rank_log import Effect, RankLog, Trained

CHECKPOINT_EVERY = 5
FAILED = 3
_PAUSE_S = 0.004

Tensors = Mapping[str, NDArray[Any]]


class Rank:
    def __init__(
        self,
        address: str,
        run: str,
        rank: int,
        dp_size: int,
        launch: str,
        start: list[int],
        failed: Collection[int],
        directory: str,
        heartbeats: str,
        slot: int,
    ) -> None:
        self._transport = Transport(address, 60.0, "rank")
        self._run, self._rank, self._dp_size, self._failed = run, rank, dp_size, failed
        self._launch = int(launch.rpartition("-")[2])
        self._directory, self._slot = Path(directory), slot
        self._heartbeats = Heartbeats(Path(heartbeats))
        self._rank_log = RankLog(self._directory / f"rank-{rank}.sqlite")
        self._repeat_late()
        resumed = self._call(
            "Resume",
            trainer_pb2.ResumeRequest(run=run, launch=launch, dp_size=dp_size, position=Position(*start).message()),
        )
        self._next, self._incarnation = Position.of(resumed.position), resumed.incarnation
        self._generation = resumed.generation
        self._trained: list[Trained] = []
        self._stepped_over: list[int] = []
        self._checkpoint = 0

    def _repeat_late(self) -> None:
        """Sends again what this rank's process before sent last, as if the network had delayed it until after a
        rollback: if it were accepted then, no checkpoint would fit the run any more."""
        for name, kind in (("Acknowledge", trainer_pb2.AcknowledgeRequest), ("Commit", trainer_pb2.CommitRequest)):
            file = self._late(name)
            if file.exists():
                with suppress(GristmillError):
                    self._call(name, kind.FromString(file.read_bytes()))

    def _late(self, name: str) -> Path:
        return self._directory / f"late-{name}-{self._rank}"

    def train(self) -> None:
        if self._rank == 0:
            # The commit of the checkpoint that it goes on from may be lost, and what it would free fills the buffer.
            self._commit()
        while (plan := self._batch()) is not None:
            count = sum(part["model"] == "policy" for part in plan["mini_batches"])
            number = self._next.batch
            order = [Position(number, epoch, index) for epoch in range(self._epochs()) for index in range(count)]
            for position, following in zip(order, [*order[1:], Position(number + 1)], strict=True):
                if position >= self._next:
                    self._train_one(position, following)
        self._save()

    def _batch(self) -> Any:
        """The next batch's plan; None after the last."""
        self._step_past_failed()
        while True:
            request = trainer_pb2.GetBatchRequest(
                run=self._run, batch=self._next.batch, wait_s=1.0, ranks=[self._rank], trains=run_pb2.MODEL_POLICY
            )
            answer = self._call("GetBatch", request, wait_s=1.0)
            if answer.state == trainer_pb2.BATCH_STATE_END:
                return None
            if answer.state == trainer_pb2.BATCH_STATE_PUBLISHED:
                return json.loads(answer.plan_json)
            if answer.state == trainer_pb2.BATCH_STATE_FORWARD:
                self._write_awaited(answer)
                time.sleep(_PAUSE_S)

    def _write_awaited(self, answer: trainer_pb2.GetBatchResponse) -> None:
        """What the batch awaits of this rank."""
        awaited_parts = {awaited.mini_batch for awaited in answer.awaits if awaited.rank == self._rank}
        for mini_batch in sorted(awaited_parts):
            self._write(mini_batch)

    def _write(self, mini_batch: int) -> None:
        """Of one of its forward shards, a column a call."""
        place = Position(self._next.batch, 0, mini_batch)
        for name, tensor in written_for(self._pull(place, forward=True), self._launch).items():
            request = trainer_pb2.WriteColumnsRequest(
                run=self._run,
                batch=place.batch,
                mini_batch=mini_batch,
                rank=self._rank,
                incarnation=self._incarnation,
                tensors=save({name: tensor}),
            )
            self._call("WriteColumns", request)

    def _step_past_failed(self) -> None:
        while self._next.batch in self._failed:
            self._stepped_over.append(self._next.batch)
            self._next = Position(self._next.batch + 1)

    def _epochs(self) -> int:
        status = self._transport.call(self._transport.runs.GetRun, run_pb2.GetRunRequest(run=self._run)).status
        return int(json.loads(status.resolved_config_json)["update_epochs_per_batch"])

    def _train_one(self, position: Position, following: Position) -> None:
        self._trained.append(Trained(position, effects_of(self._pull(position))))
        acknowledge = trainer_pb2.AcknowledgeRequest(
            run=self._run, rank=self._rank, position=position.message(), incarnation=self._incarnation
        )
        self._late("Acknowledge").write_bytes(acknowledge.SerializeToString())
        self._generation = self._call("Acknowledge", acknowledge).generation
        self._next = following
        if len(self._trained) == CHECKPOINT_EVERY:
            self._save()
        time.sleep(_PAUSE_S)

    def _save(self) -> None:
        """A checkpoint is one once all ranks have it; then what lies before it may be freed."""
        self._checkpoint += 1
        self._rank_log.save(self._checkpoint, self._next, self._generation, self._trained, self._stepped_over)
        self._trained, self._stepped_over = [], []
        (self._directory / f"saved-{self._checkpoint}-{self._rank}").touch()
        if self._rank == 0:
            while not all((self._directory / f"saved-{self._checkpoint}-{r}").exists() for r in range(self._dp_size)):
                time.sleep(0.005)
                self._heartbeats.beat(self._slot)
            self._commit()

    def _commit(self) -> None:
        request = trainer_pb2.CommitRequest(run=self._run, position=self._next.message(), incarnation=self._incarnation)
        self._late("Commit").write_bytes(request.SerializeToString())
        self._call("Commit", request)

    def _pull(self, position: Position, *, forward: bool = False) -> bytes:
        """The shard's file: mapped where it can be, else streamed, also without its padding. forward: the forward shard
        is wanted, too, while the batch waits for columns."""
        request = trainer_pb2.GetShardRequest(
            run=self._run,
            rank=self._rank,
            position=position.message(),
            incarnation=self._incarnation,
            wait_s=1.0,
            forward=forward,
        )
        deadline = time.monotonic() + 60
        while True:
            shard = self._call("GetShard", request, wait_s=1.0)
            if shard.state in (trainer_pb2.BATCH_STATE_PUBLISHED, trainer_pb2.BATCH_STATE_FORWARD):
                try:
                    data = self._read(position, shard)
                except grpc.RpcError as call:
                    failure = failure_of(call, "the service")
                    # A batch that is rebuilt after its service died is not there for a moment.
                    if (not failure.may_retry and failure.error.code != "NOT_FOUND") or time.monotonic() > deadline:
                        raise failure.error from None
                    time.sleep(0.1)
                    continue
                if len(data) == shard.size_bytes:
                    return data
            elif not forward:
                # The store may have lost what was written.
                again = trainer_pb2.GetBatchRequest(run=self._run, batch=position.batch)
                self._write_awaited(self._call("GetBatch", again))

    def _read(self, position: Position, shard: trainer_pb2.GetShardResponse) -> bytes:
        if shard.shared_memory_path:
            try:
                data = Path(shard.shared_memory_path).read_bytes()
                if len(data) == shard.size_bytes:
                    return data
            except OSError:
                pass
        request = trainer_pb2.ReadShardRequest(
            run=self._run,
            rank=self._rank,
            batch=position.batch,
            mini_batch=position.mini_batch,
            accepts_zstd=True,
        )
        pieces = list(self._transport.trainers.ReadShard(request, timeout=20))
        self._heartbeats.beat(self._slot)
        return b"".join(decompressed(one.data, FRAME_BYTES) if one.is_zstd else one.data for one in pieces)

    def _call(self, name: str, request: Any, wait_s: float = 0.0) -> Any:
        method = getattr(self._transport.trainers, name)

        def call(request: Any, timeout: float) -> Any:
            return method(iter([request]) if name == "WriteColumns" else request, timeout=timeout)

        answer = self._transport.call(call, request, wait_s=wait_s)
        self._heartbeats.beat(self._slot)
        return answer


def effects_of(data: bytes) -> list[Effect]:
    """The real rows of a shard's file."""
    tensors, uids = load(data), _uids(data)
    effects = []
    for index, uid in enumerate(uids):
        if tensors["is_padding"][index]:
            continue
        tokens = tensors["sequences"][index][tensors["attention_mask"][index] == 1]
        sample, first, last = (int(tensors[name][index]) for name in ("sample", "step_first", "step_last"))
        is_trained = tensors["loss_mask"][index] == 1
        trained, reward = int(is_trained.sum()), float(tensors["rewards"][index].sum())
        effect = Effect(uid, sample, first, last, digest(tokens.astype(np.int64).tolist()), trained, reward)
        if "launch" in tensors:
            columns, launch = digest(_columns(tensors, index)), int(tensors["launch"][index])
            advantage = float(tensors["advantages"][index][is_trained].sum(dtype=np.float64))
            effect = effect._replace(columns=columns, launch=launch, advantage=advantage)
        effects.append(effect)
    return effects


def _uids(data: bytes) -> list[str]:
    length = int.from_bytes(data[:8], "little")
    uids: list[str] = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["uids"])
    return uids


def _columns(tensors: Tensors, index: int) -> list[Any]:
    """A row's own values of the run's columns, as `tests.tools.chaos.expected` has them."""
    tokens, response = tensors["attention_mask"][index] == 1, tensors["response_mask"][index] == 1
    offsets = tensors["images_offsets"]
    return [
        tensors["experts"][index][tokens].tolist(),
        tensors["teacher"][index][response].tolist(),
        int(tensors["calls"][index]),
        tensors["images"][offsets[index] : offsets[index + 1]].tolist(),
        int(tensors["images_given"][index]),
        tensors["values"][index][response].tolist(),
    ]


def written_for(data: bytes, launch: int) -> dict[str, NDArray[Any]]:
    """The columns that a launch writes for a forward shard, with something on padding and padding rows, too; nothing
    where the shard has them."""
    tensors = load(data)
    if any(name in tensors for name in WRITTEN):
        return {}
    response_mask = tensors["response_mask"] == 1
    values = np.full(response_mask.shape, 99, np.float32)
    for index, uid in enumerate(_uids(data)):
        sample, last = int(tensors["sample"][index]), int(tensors["step_last"][index])
        values[index, response_mask[index]] = written.values(uid, sample, last, int(response_mask[index].sum()), launch)
    return {"values": values, "launch": np.full(len(response_mask), launch, np.int32)}


def main() -> None:
    try:
        Rank(**json.loads(sys.argv[1])).train()
    except GristmillError as error:
        print(f"rank: {type(error).__name__}: {error}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(FAILED if isinstance(error, BatchFailedError) else 1)


if __name__ == "__main__":
    main()
