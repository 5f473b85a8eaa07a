"""Gets a shard's tensors: maps the service's shared memory where it is this machine's, else streams the bytes,
compressed where the service has them so."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill._client.connection.transport import Transport
from gristmill._torch.device_copies import Copies
from gristmill._torch.shard_files import Tensors, map_shard, parse_shard
from gristmill._wire.addresses import ShardAddress, is_mappable, read_header
from gristmill._wire.codecs.shard_messages import piece_of
from gristmill._wire.codecs.zstd_frames import DamagedFrameError, decompressed, is_available
from gristmill.errors import InvalidArgumentError, UnavailableError
from gristmill.v1 import trainer_pb2

# A stream that brings less than this is given up and made again.
_SLOWEST_BYTES_PER_S = 5e6
_READ_SHARD = "/gristmill.v1.TrainerService/ReadShard"


class Opened(NamedTuple):
    """A shard's tensors, and what of them is on its way to the device."""

    tensors: Tensors
    metadata: dict[str, Any]
    is_mapped: bool
    is_forward: bool = False
    copies: Copies = MappingProxyType({})


class ReplacedError(UnavailableError):
    """The shard that came is another than the one that was found: its batch was published anew in between."""


def map_published(address: ShardAddress, path: str, size: int) -> tuple[Tensors, dict[str, Any]] | None:
    """The shard's tensors, mapped; None where the file is not there, or is not the one meant: the service's memory is
    not this machine's, or the batch was freed at this moment."""
    if not path or not is_mappable(path, size):
        return None
    try:
        tensors, metadata = map_shard(path)
    except (OSError, InvalidArgumentError):
        return None
    return (tensors, metadata) if address.is_of(metadata) else None


def stream(
    transport: Transport, address: ShardAddress, size: int, columns: Sequence[str] | None = None
) -> tuple[Tensors, dict[str, Any]]:
    """A copy, over the connection; blocks until the file's `size` bytes are here. A stream that breaks is made
    again, from its start, by another replica where there is one. columns: the declared ones that are wanted; None: all.

    Raises what the call ends with, NotFoundError for instance when the batch is freed.
    """
    request: trainer_pb2.ReadShardRequest = address.request()
    request.accepts_zstd = is_available()
    if columns is not None:
        request.chooses_columns = True
        request.columns.extend(columns)
    read, wait_s = partial(_read, transport, address, size), size / _SLOWEST_BYTES_PER_S
    try:
        data = transport.call(read, request, wait_s=wait_s)
    except DamagedFrameError:
        # Frames pass the service unread. What is asked for as it is it decompresses itself, and builds a batch again
        # whose bytes are not those that were published.
        request.accepts_zstd = False
        data = transport.call(read, request, wait_s=wait_s)
    return parse_shard(data, str(address))


def _read(transport: Transport, address: ShardAddress, size: int, request: Any, timeout: float) -> NDArray[np.uint8]:
    """The file's bytes; more or less than `size` where the service sends more or less."""
    # Bytes as they come, which `piece_of` reads.
    serialize = trainer_pb2.ReadShardRequest.SerializeToString
    read = transport.channels.unary_stream(_READ_SHARD, request_serializer=serialize)
    data: NDArray[np.uint8] = np.empty(size, np.uint8)
    into, came = data.data, 0
    for message in read(request, timeout=timeout):
        piece, is_zstd = piece_of(message)
        content = decompressed(piece, max(0, size - came)) if is_zstd else piece
        # What is too much is counted only.
        into[came : came + len(content)] = content[: max(0, size - came)]
        came += len(content)
    if request.chooses_columns and came <= size:
        # What was left out is not known before it has come.
        return data[:came]
    if came != size and came == _file_size(data[:came]):
        raise ReplacedError(f"{address}: {came} bytes came where the service said {size}: it was published anew")
    if came != size:
        raise UnavailableError(f"{address}: {came} bytes came where the service said {size}; read it again")
    return data


def _file_size(data: NDArray[np.uint8]) -> int:
    """The bytes that a shard's file has by its header; 0 for what is none."""
    try:
        head = data[: 8 + int.from_bytes(data[:8].tobytes(), "little")]
        _, entries, begin = read_header(io.BytesIO(head.tobytes()), len(head) + 1, "shard")
    except (InvalidArgumentError, OverflowError):
        return 0
    return begin + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
