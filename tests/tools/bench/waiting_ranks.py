"""Ranks in a few processes, a thread and a connection for each, that wait for a batch and the place of their shard.

`python -m tests.tools.bench.waiting_ranks COUNT FIRST` is one of the processes.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from gristmill._wire.addresses import Position
from gristmill.v1 import run_pb2, trainer_pb2
from tests.tools.bench.bare import WAIT
from tests.tools.bench.teams import lead

_GET_BATCH = "/gristmill.v1.TrainerService/GetBatch"
_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)
_WAIT_S = 30.0


class Rank:
    def __init__(self, number: int) -> None:
        self._number = number
        self._channels: dict[str, grpc.Channel] = {}

    def connect(self, address: str) -> grpc.Channel:
        if address not in self._channels:
            self._channels[address] = grpc.insecure_channel(address, _OPTIONS)
            grpc.channel_ready_future(self._channels[address]).result(_WAIT_S)
        return self._channels[address]

    def hold(self, address: str, run: str, batch: int) -> float:
        """When (time.monotonic) the rank had found its shard of the batch."""
        channel = self.connect(address)
        wanted = trainer_pb2.GetShardRequest(
            model=run_pb2.MODEL_POLICY, rank=self._number, position=Position(batch).message()
        )
        asked = trainer_pb2.GetBatchRequest(run=run, batch=batch, wait_s=_WAIT_S, shard=wanted)
        answer = channel.unary_unary(_GET_BATCH)(asked.SerializeToString(), timeout=2 * _WAIT_S)
        response = trainer_pb2.GetBatchResponse.FromString(answer)
        assert response.state == trainer_pb2.BATCH_STATE_PUBLISHED, f"batch {batch} is {response.state}"
        shard = response.shard
        assert Path(shard.shared_memory_path).stat().st_size == shard.size_bytes
        return time.monotonic()

    def wait(self, address: str) -> float:
        """When the rank was released by bare gRPC."""
        self.connect(address).unary_unary(WAIT)(b"", timeout=2 * _WAIT_S)
        return time.monotonic()


def carry_out(ranks: list[Rank], pool: ThreadPoolExecutor, order: dict[str, Any]) -> list[float]:
    """An order names an address, and a run with a batch unless the server is bare."""
    return list(pool.map(lambda rank: rank.wait(**order) if len(order) == 1 else rank.hold(**order), ranks))


if __name__ == "__main__":
    lead(Rank, carry_out)
