"""What happens to a run's control keys, each step whole or not at all, behind one typed function each.

The keys share a hash tag, so that one node of a cluster has them all. Whoever changes a run names its *token*, which
the last to claim the run made up: with another one, nothing happens. So a former owner that wakes up changes nothing.
"""

from __future__ import annotations

from enum import Enum
from hashlib import sha1
from typing import Any, cast
from urllib.parse import quote

import msgspec
import redis
from redis.cluster import RedisCluster

Client = redis.Redis | RedisCluster


class Owner(msgspec.Struct, frozen=True):
    """The process that decides for a run, and where the others reach it."""

    process: str
    grpc_address: str
    http_url: str


class Appended(Enum):
    DONE = b"done"
    FENCED = b"fenced"
    LOST = b"lost"
    """The log does not end where its owner left it: the server has forgotten, or somebody else has written."""


_CREATE = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('XADD', KEYS[2], '1-0', 'e', '')
return 1
"""
_CLAIM = """
local owner = redis.call('GET', KEYS[2])
if owner and cjson.decode(owner).process ~= ARGV[2] then return owner end
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('SET', KEYS[3], ARGV[1])
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
return redis.call('INCR', KEYS[4])
"""
_FENCE = "if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {fenced} end\n"
_RENEW = (
    _FENCE.format(fenced="0")
    + """
if redis.call('PEXPIRE', KEYS[2], ARGV[3]) == 0 then redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3]) end
return 1
"""
)
_RELEASE = _FENCE.format(fenced="0") + "return redis.call('DEL', KEYS[2])"
_APPEND = (
    _FENCE.format(fenced="'fenced'")
    + """
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
if not last then return 'lost' end
if last[1] == ARGV[3] then return 'done' end
if last[1] ~= ARGV[2] then return 'lost' end
redis.call('XADD', KEYS[2], ARGV[3], 'e', ARGV[4])
return 'done'
"""
)
_COMPACT = (
    _FENCE.format(fenced="0")
    + """
redis.call('SET', KEYS[3], ARGV[3])
redis.call('XTRIM', KEYS[2], 'MINID', ARGV[2])
return 1
"""
)
_PUBLISH = (
    _FENCE.format(fenced="0")
    + """
local before = redis.call('GET', KEYS[2])
redis.call('SET', KEYS[2], ARGV[2])
return before or ''
"""
)
_WITHDRAW = (
    _FENCE.format(fenced="0")
    + """
local before = redis.call('GET', KEYS[2])
redis.call('DEL', KEYS[2])
return before or ''
"""
)
# The fence of a run that is half deleted is gone already.
_DELETE = """
local fence = redis.call('GET', KEYS[1])
if fence and fence ~= ARGV[1] then return 0 end
redis.call('DEL', unpack(KEYS, 2))
return 1
"""


class ControlKeys:
    """Of one run, whatever it is called."""

    def __init__(self, prefix: str, run: str) -> None:
        tag = f"{{{prefix}:{quote(run, safe='')}}}"
        self.config, self.log, self.snapshot = f"{tag}:config", f"{tag}:log", f"{tag}:snapshot"
        self.owner, self.fence, self.claims = f"{tag}:owner", f"{tag}:fence", f"{tag}:claims"

    @property
    def all(self) -> list[str]:
        return [self.config, self.log, self.snapshot, self.owner, self.claims]


class Scripts:
    """Raises redis-py's own errors. Every step may be repeated: done twice, it is done once."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._digests: dict[str, Any] = {}

    def create(self, keys: ControlKeys, config: bytes) -> bool:
        """Whether there was no such run."""
        return bool(self._run(_CREATE, [keys.config, keys.log], config))

    def claim(self, keys: ControlKeys, token: str, owner: Owner, lease_ms: int) -> int | Owner | None:
        """How often the run was claimed, with this; the owner where another process is that; None: no such run."""
        names = [keys.config, keys.owner, keys.fence, keys.claims]
        found = self._run(_CLAIM, names, token, owner.process, msgspec.json.encode(owner), lease_ms)
        if isinstance(found, bytes):
            return msgspec.json.decode(found, type=Owner)
        return int(found) or None

    def renew(self, keys: ControlKeys, token: str, owner: Owner, lease_ms: int) -> bool:
        """Whether the run is still this owner's."""
        return bool(self._run(_RENEW, [keys.fence, keys.owner], token, msgspec.json.encode(owner), lease_ms))

    def release(self, keys: ControlKeys, token: str) -> None:
        self._run(_RELEASE, [keys.fence, keys.owner], token)

    def append(self, keys: ControlKeys, token: str, number: int, record: bytes) -> Appended:
        """The record becomes the log's number `number`, after `number - 1`."""
        return Appended(self._run(_APPEND, [keys.fence, keys.log], token, f"{number - 1}-0", f"{number}-0", record))

    def compact(self, keys: ControlKeys, token: str, number: int, snapshot: bytes) -> bool:
        """Sets what tells of the snapshot, and forgets the log before number `number`. Whether that was allowed."""
        return bool(self._run(_COMPACT, [keys.fence, keys.log, keys.snapshot], token, f"{number}-0", snapshot))

    def publish(self, keys: ControlKeys, token: str, key: str, value: bytes) -> bytes | None:
        """Sets a key of the same hash tag. Its value before; None where that was not allowed."""
        found = self._run(_PUBLISH, [keys.fence, key], token, value)
        return found if isinstance(found, bytes) else None

    def withdraw(self, keys: ControlKeys, token: str, key: str) -> bytes | None:
        """Removes a key of the same hash tag. Its value before; None where that was not allowed."""
        found = self._run(_WITHDRAW, [keys.fence, key], token)
        return found if isinstance(found, bytes) else None

    def delete(self, keys: ControlKeys, token: str) -> bool:
        """All but the fence, so that nothing of a former owner's comes back; that one goes by `forget`. Whether that
        was allowed."""
        return bool(self._run(_DELETE, [keys.fence, *keys.all], token))

    def forget(self, keys: ControlKeys) -> None:
        self.client.delete(keys.fence)

    def _run(self, script: str, keys: list[str], *arguments: Any) -> Any:
        """By its digest, and by its text where the server does not know that yet."""
        digest = self._digests.get(script)
        if digest is None:
            digest = self._digests[script] = _sha1(script)
        try:
            return cast(Any, self.client.evalsha(digest, len(keys), *keys, *arguments))
        except redis.exceptions.NoScriptError:
            return cast(Any, self.client.eval(script, len(keys), *keys, *arguments))


def _sha1(script: str) -> str:
    """The name that Redis gives a script; nothing is secured by it."""
    return sha1(script.encode(), usedforsecurity=False).hexdigest()
