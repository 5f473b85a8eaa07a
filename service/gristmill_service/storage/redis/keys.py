"""A run's keys in Redis, and the form of values: large values are split into pieces, and each ends with a checksum.

All keys of a run have the same hash tag, so that one server of a cluster stores them all: scripts, MGET and UNLINK of a
run work there like on a single server.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, cast
from urllib.parse import quote
from zlib import crc32

import msgspec
import redis

from gristmill.errors import InvalidArgumentError
from gristmill_service.storage.redis.connection import Client, server_of

VALUE_BYTES = 8 << 20
"""The maximum number of bytes that one command writes. It respects the socket's timeout and Redis' limit (512 MiB)."""
KEYS_AT_ONCE = 500
CRC_BYTES = 4


class RunKeys:
    """The names of one run's keys, for any run name.

    config: the description of the run from its creation. log: the stream of records. head: a hash of mutable fields:
    the owner's `token` and `claim`, the `last` appended record, `generation`, `snapshot`, `reported`. owner: the lease.
    """

    def __init__(self, prefix: str, run: str) -> None:
        self.run, self.bare = run, f"{prefix}:{quote(run, safe='')}"
        self.tag = f"{{{self.bare}}}"
        self.config, self.log, self.head, self.owner = (
            f"{self.tag}:{name}" for name in ("config", "log", "head", "owner")
        )

    def rows(self, run_id: str, number: int) -> str:
        """The key of a table of rows. run_id: ensures that a run never finds rows of an earlier run of its name."""
        return f"{self.tag}:rows:{run_id}:{number}"

    def snapshot(self, token: str, number: int) -> str:
        """The beginning of the keys of a snapshot's pieces. token: of the claim whose snapshot `number` it is."""
        return f"{self.tag}:snapshot:{token}:{number}"

    def batch(self, number: int) -> str:
        """The key of a published batch, which is a hash."""
        return f"{self.tag}:batch:{number}"

    def staged(self, claim: int, nonce: str) -> str:
        """The key of a batch that is being written. claim: its writer's claim of the run."""
        return f"{self.tag}:staged:{claim}:{nonce}"

    def scan(self, client: Client, kind: str = "") -> Iterator[bytes]:
        """Yields the run's keys of a kind, such as "rows:", or all keys. Scans all keys of the run's server."""
        return scan(server_of(client, self.head), f"{self.tag}:{kind}")


def tag_and_parts(key: bytes) -> tuple[str, list[str]]:
    """Returns a key's hash tag, and the parts of its name after the tag, such as ["batch", "7"]."""
    tag, _, name = key.decode().rpartition("}:")
    return f"{tag}}}", name.split(":")


def scan(client: Client, beginning: str) -> Iterator[bytes]:
    """Yields all keys with a prefix."""
    pattern = re.sub(r"([*?\[\]^\\])", r"\\\1", beginning) + "*"
    return cast(Iterator[bytes], client.scan_iter(match=pattern, count=KEYS_AT_ONCE))


def unlink(client: Client, keys: Iterable[str | bytes]) -> int:
    """Removes keys of one run. Returns how many existed."""
    left, count = iter(keys), 0
    while some := list(islice(left, KEYS_AT_ONCE)):
        count += client.unlink(*some)
    return count


def sealed(buffers: Iterable[bytes | memoryview]) -> bytes:
    """Joins buffers into a value that ends with its CRC-32."""
    buffers, crc = list(buffers), 0
    for buffer in buffers:
        crc = crc32(buffer, crc)
    return b"".join([*buffers, crc.to_bytes(CRC_BYTES, "little")])


def unsealed(value: bytes | None) -> memoryview | None:
    """Returns the content of a sealed value; None if it is missing or damaged."""
    if value is None or len(value) < CRC_BYTES:
        return None
    content = memoryview(value)[:-CRC_BYTES]
    return content if crc32(content) == int.from_bytes(value[-CRC_BYTES:], "little") else None


def pieces(key: str, size: int) -> list[str]:
    """Returns the keys of the pieces of a value of `size` bytes. The first key is `key` itself."""
    return [key, *(f"{key}:{index}" for index in range(1, -(-size // VALUE_BYTES)))]


def write_value(client: Client, key: str, value: bytes) -> Sequence[str]:
    """Writes a value in pieces. Returns the keys of the pieces."""
    names = pieces(key, len(value))
    for index, name in enumerate(names):
        client.set(name, cast(Any, memoryview(value)[index * VALUE_BYTES : (index + 1) * VALUE_BYTES]))
    return names


def read_values(client: Client, names: Sequence[str]) -> list[bytes | None]:
    """Returns the values of keys of one run; None for a missing key or another type. Read at most some MiB at once."""
    return cast(list[bytes | None], client.mget(names)) if names else []


def damaged(key: str, reason: object) -> InvalidArgumentError:
    return InvalidArgumentError(f"{key} in Redis is damaged: {reason}; restore it, or delete the run")


@contextmanager
def reading(key: str) -> Iterator[None]:
    """Converts errors from reading a damaged value to InvalidArgumentError that names the key."""
    try:
        yield
    except redis.ResponseError as error:
        if "WRONGTYPE" not in str(error):
            raise
        raise damaged(key, "it is of another type") from None
    except (msgspec.MsgspecError, ValueError, KeyError) as error:
        if isinstance(error, InvalidArgumentError):
            raise
        raise damaged(key, error) from None
