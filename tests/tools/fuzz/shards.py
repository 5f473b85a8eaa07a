"""Shards as they travel: frames of zstd, and columns that trainers write."""

from __future__ import annotations

from typing import Any

import numpy as np

from gristmill._wire.codecs import columns_codec, tensor_file
from gristmill._wire.codecs.zstd_frames import compressed, decompressed
from gristmill.v1 import trainer_pb2
from gristmill_service.api.rpc.handling import parsed
from tests.tools.fuzz.mutate import changed_bytes
from tests.tools.fuzz.targets import Target

_MOST_BYTES = 1 << 20


def _seeds() -> list[bytes]:
    return [compressed(data) for data in (b"", b"shard", bytes(100_000), bytes(range(256)) * 50)]


def _read(data: bytes) -> None:
    assert len(decompressed(data, _MOST_BYTES)) <= _MOST_BYTES


def _tensor_seeds() -> list[bytes]:
    one: dict[str, Any] = {"policy/0/values": np.zeros((2, 3), np.float32), "policy/0/mask": np.ones((2, 3), np.int64)}
    return [tensor_file.encode(one), tensor_file.encode({"x": np.zeros(0, np.float32)})]


def _read_tensors(data: bytes | memoryview) -> None:
    for tensor in tensor_file.decode(data).values():
        assert tensor.nbytes <= len(data)


def _write_seeds() -> list[bytes]:
    request = trainer_pb2.WriteColumnsRequest(run="run", batch=3, mini_batch=1, rank=2, incarnation=1)
    [by_hand] = columns_codec.messages(request, tensor_file.encode({"values": np.zeros(5, np.float32)}))
    request.tensors = _tensor_seeds()[0]
    return [by_hand, request.SerializeToString()]


def _read_write(data: bytes) -> None:
    request = parsed(data, trainer_pb2.WriteColumnsRequest.DESCRIPTOR, columns_codec.ColumnsRequest)
    assert len(request.tensors) <= len(data)
    _read_tensors(request.tensors)
    assert len(columns_codec.part_of(data)) <= len(data)


FRAMES = Target("zstd_frames", _seeds, changed_bytes, _read)
TENSORS = Target("tensors", _tensor_seeds, changed_bytes, _read_tensors)
WRITES = Target("writes", _write_seeds, changed_bytes, _read_write)
