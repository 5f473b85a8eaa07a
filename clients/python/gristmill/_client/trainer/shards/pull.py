"""Gets a shard's tensors: maps the service's shared memory if it is on this machine, else streams the bytes, in the
compressed form if the service has it."""

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

_READ_SHARD = "/gristmill.v1.TrainerService/ReadShard"


class Opened(NamedTuple):
    """A shard's tensors, and their copies to the device that were started."""

    tensors: Tensors
    metadata: dict[str, Any]
    is_mapped: bool
    is_forward: bool = False
    copies: Copies = MappingProxyType({})


class ReplacedError(UnavailableError):
    """The batch was published again after the shard was located and before it was read."""


def map_published(address: ShardAddress, path: str, size: int) -> tuple[Tensors, dict[str, Any]] | None:
    """Map the shard's file and return its tensors. Return None if the file does not exist or contains another shard,
    because the service's memory is not on this machine or the batch was just freed."""
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
    """Copy a shard over the connection, and block until the file's `size` bytes have arrived. A broken stream is
    repeated from its start, by another replica if there is one. columns: the declared columns to read; None: all.

    Raises the call's error, for example NotFoundError if the batch is freed.
    """
    request: trainer_pb2.ReadShardRequest = address.request()
    request.accepts_zstd = is_available()
    if columns is not None:
        request.chooses_columns = True
        request.columns.extend(columns)
    read = partial(_read, transport, address, size)
    try:
        data = transport.call(read, request)
    except DamagedFrameError:
        # The service sends compressed frames unread. Request them uncompressed, so that the service decompresses them
        # and rebuilds the batch if they are damaged.
        request.accepts_zstd = False
        data = transport.call(read, request)
    return parse_shard(data, str(address))


def _read(transport: Transport, address: ShardAddress, size: int, request: Any, timeout: float) -> NDArray[np.uint8]:
    """Return the file's bytes. Raises UnavailableError if the service sends more or fewer than `size`."""
    # No deserializer, because `piece_of` reads the bytes of the messages.
    serialize = trainer_pb2.ReadShardRequest.SerializeToString
    read = transport.channels.unary_stream(_READ_SHARD, request_serializer=serialize)
    data: NDArray[np.uint8] = np.empty(size, np.uint8)
    target, received = data.data, 0
    for message in read(request, timeout=timeout):
        piece, is_zstd = piece_of(message)
        content = decompressed(piece, max(0, size - received)) if is_zstd else piece
        # Bytes beyond `size` are only counted.
        target[received : received + len(content)] = content[: max(0, size - received)]
        received += len(content)
    if request.chooses_columns and received <= size:
        # The size of the chosen columns alone is not known beforehand.
        return data[:received]
    if received != size and received == _file_size(data[:received]):
        raise ReplacedError(f"{address}: received {received} bytes instead of {size}: the batch was published again")
    if received != size:
        raise UnavailableError(f"{address}: received {received} bytes instead of {size}; read the shard again")
    return data


def _file_size(data: NDArray[np.uint8]) -> int:
    """Return the file size according to the shard's header; 0 if there is no valid header."""
    try:
        head = data[: 8 + int.from_bytes(data[:8].tobytes(), "little")]
        _, entries, begin = read_header(io.BytesIO(head.tobytes()), len(head) + 1, "shard")
    except (InvalidArgumentError, OverflowError):
        return 0
    return begin + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
