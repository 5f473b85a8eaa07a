"""Shards as they travel: the compact form, and columns that trainers write."""

from __future__ import annotations

import struct
import zlib
from random import Random
from typing import Any

import numpy as np

from gristmill._wire.codecs import columns_codec, tensor_file
from gristmill._wire.codecs.compact_shards import PART, restore
from gristmill._wire.rows import from_rows
from gristmill.v1 import trainer_pb2
from gristmill_service.api.rpc.intake import parsed
from gristmill_service.config import parse_config
from gristmill_service.pipeline import build_batch
from gristmill_service.pipeline.layout.iovec import join
from tests.fuzz.mutate import changed_bytes
from tests.fuzz.targets import Target

# As the format's own module has it.
HEAD = struct.Struct("<7sBIIIIQ")
_MOST_BYTES = 1 << 24


def _seeds() -> list[bytes]:
    rows = [
        {
            "uid": f"p{index // 2}",
            "sample": index % 2,
            "prompt_token_ids": [7, 8],
            "response_ids": list(range(1, 2 + index)),
            "loss_mask": [1] * (1 + index),
            "rollout_logprobs": [-0.5] * (1 + index),
            "reward": float(index),
        }
        for index in range(8)
    ]
    found = []
    for layout in ("left_padded", "packed"):
        config = {
            "train_batch_size": 4,
            "n_samples_per_prompt": 2,
            "policy_mini_batch_size": 2,
            "micro_batch": {"size": 2},
            "layout": layout,
        }
        batch = build_batch(from_rows(rows, step_wise=False), parse_config(config), run="r", batch=0)
        found += [join(shard.compact()) for shard in batch.shards]
    return found


def _change(random: Random, data: bytes) -> bytes:
    """Mostly of the head, whose checksum is made right again: what is wrong has to be found by what it says."""
    _, _, parts, rows, *_ = HEAD.unpack_from(data)
    end = HEAD.size + parts * PART.itemsize + 8 * rows
    if random.random() < 0.2:
        return changed_bytes(random, data)
    head = bytearray(data[:end])
    for _ in range(random.randint(1, 3)):
        size = random.choice((1, 2, 4, 8))
        at = random.randrange(8, end - size)
        value = random.choice((0, 1, 2, 3, 8, 255, 1 << 16, 1 << 31, 1 << 40, (1 << 64) - 1)) % 256**size
        head[at : at + size] = value.to_bytes(size, "little")
    return _sealed(bytes(head) + data[end:])


def _sealed(data: bytes) -> bytes:
    """The bytes with the checksum that a writer of this table would have given them."""
    magic, version, parts, rows, _, reserved, size = HEAD.unpack_from(data)
    table = data[HEAD.size : HEAD.size + parts * PART.itemsize + 8 * rows]
    checksum = zlib.crc32(HEAD.pack(magic, version, parts, rows, 0, reserved, size) + table)
    return HEAD.pack(magic, version, parts, rows, checksum, reserved, size) + data[HEAD.size :]


def _read(data: bytes) -> None:
    if len(data) >= HEAD.size and HEAD.unpack_from(data)[-1] > _MOST_BYTES:
        # Taken, it would be so much memory that is never touched.
        return
    assert restore([data]).nbytes == HEAD.unpack_from(data)[-1]


def _tensor_seeds() -> list[bytes]:
    one: dict[str, Any] = {"policy/0/values": np.zeros((2, 3), np.float32), "policy/0/mask": np.ones((2, 3), np.int64)}
    return [tensor_file.encode(one), tensor_file.encode({"x": np.zeros(0, np.float32)})]


def _read_tensors(data: bytes | memoryview) -> None:
    for tensor in tensor_file.decode(data).values():
        assert tensor.nbytes <= len(data)


def _write_seeds() -> list[bytes]:
    request = trainer_pb2.WriteColumnsRequest(run="run", batch=3, mini_batch=1, rank=2, incarnation=1)
    by_hand = columns_codec.encode(request, {"values": np.zeros(5, np.float32)})
    request.tensors = _tensor_seeds()[0]
    return [by_hand, request.SerializeToString()]


def _read_write(data: bytes) -> None:
    request = parsed(data, columns_codec.ColumnsRequest)
    assert len(request.tensors) <= len(data)
    _read_tensors(request.tensors)


COMPACT = Target("compact_shards", _seeds, _change, _read)
TENSORS = Target("tensors", _tensor_seeds, changed_bytes, _read_tensors)
WRITES = Target("writes", _write_seeds, changed_bytes, _read_write)
