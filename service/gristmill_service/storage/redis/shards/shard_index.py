"""The index of a published batch in Redis: which shards it has, and the publication that wrote their pieces."""

from __future__ import annotations

from typing import Self

import msgspec

from gristmill.errors import FailedPreconditionError
from gristmill_service.config import Model
from gristmill_service.pipeline.layout.shard_address import ShardAddress
from gristmill_service.storage.redis.shards.shard_keys import ShardKeys

VERSION = 2
"""Format 1 had other pieces, which are found to be damaged, so that their batch is built again."""


class StoredShard(msgspec.Struct, frozen=True, array_like=True):
    """size: of its file. stored_size: of its pieces. pieces: the number of values that they are."""

    model: Model
    mini_batch: int
    rank: int
    size: int
    stored_size: int
    pieces: int

    @property
    def address(self) -> ShardAddress:
        return ShardAddress(self.model, self.mini_batch, self.rank)

    def keys(self, keys: ShardKeys, nonce: str) -> list[str]:
        """The keys of its pieces, in order."""
        return [keys.piece(nonce, self.address, number) for number in range(self.pieces)]


class ShardIndex(msgspec.Struct, frozen=True):
    """nonce: the publication's, which the keys of its pieces hold."""

    nonce: str
    shards: tuple[StoredShard, ...]

    @classmethod
    def decode(cls, data: bytes, batch: int) -> Self:
        """Raises FailedPreconditionError for a newer format, and for a damaged index."""
        version = data[0] if data else 0
        if version not in (1, VERSION):
            raise FailedPreconditionError(
                f"batch {batch} in Redis has format {version} and this version reads {VERSION}; use the gristmill that "
                "published it, or a newer one"
            )
        try:
            return msgspec.msgpack.decode(memoryview(data)[1:], type=cls)
        except msgspec.MsgspecError as error:
            raise FailedPreconditionError(
                f"the index of batch {batch} in Redis is damaged: {error}; acknowledge the batch, or delete the run"
            ) from None

    def encode(self) -> bytes:
        return bytes([VERSION]) + msgspec.msgpack.encode(self)

    def keys(self, keys: ShardKeys) -> list[str]:
        """The keys of all that the batch is made of, but for the index itself."""
        return [keys.plan(self.nonce), *(key for shard in self.shards for key in shard.keys(keys, self.nonce))]
