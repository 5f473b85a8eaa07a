"""The steps that change a run's control keys, each whole or not at all: a script and a typed function for each.

The keys share a hash tag, so that one node of a cluster has them all. Whoever changes a run names its *token*, which
the last to claim the run made up: with another one, nothing happens. So a former owner that wakes up changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from hashlib import sha1
from typing import Any, cast
from urllib.parse import quote

import msgspec
from redis.exceptions import AskError, NoScriptError

from gristmill_service.storage.redis.servers.connection import Client
from gristmill_service.storage.redis.servers.durability import Durability, execute, server_of


class Owner(msgspec.Struct, frozen=True):
    """The process that decides for a run, and where the others reach it. secret: what they show it then; empty of a
    version that asked for none."""

    process: str
    grpc_address: str
    http_url: str
    secret: str = ""


class Outcome(Enum):
    """The result of a step that only the run's owner may take."""

    DONE = b"done"
    FENCED = b"fenced"
    """Another process has claimed the run since."""
    LOST = b"lost"
    """The log does not end where its owner left it, or rows that the record refers to are gone: Redis has forgotten."""
    UNCONFIRMED = b""
    """It is done on the server, and too few copies of it are known."""


class _Script:
    """A script's text, and its digest, by which a server knows it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.digest = sha1(text.encode(), usedforsecurity=False).hexdigest()


_FENCE = "if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {fenced} end\n"
_LAST = "local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]\n"

_CREATE = _Script("""
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('XADD', KEYS[2], '1-0', 'e', '')
return 1
""")
# A claim has a larger number than all before it, also where a failover made the server forget the last of them: tables
# of rows are named by it, and their names must never be used again.
_CLAIM = _Script("""
local owner = redis.call('GET', KEYS[2])
if owner and cjson.decode(owner).process ~= ARGV[2] then return owner end
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('SET', KEYS[3], ARGV[1])
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
local claim = math.max(tonumber(redis.call('GET', KEYS[4]) or '0') + 1, tonumber(ARGV[5]))
redis.call('SET', KEYS[4], string.format('%d', claim))
return claim
""")
_RENEW = _Script(
    _FENCE.format(fenced="'fenced'")
    + """
if redis.call('PEXPIRE', KEYS[3], ARGV[3]) == 0 then redis.call('SET', KEYS[3], ARGV[2], 'PX', ARGV[3]) end
"""
    + _LAST
    + """
if not last or tonumber(string.match(last[1], '%d+')) < tonumber(ARGV[4]) then return 'lost' end
return 'done'
"""
)
_RELEASE = _Script(_FENCE.format(fenced="0") + "return redis.call('DEL', KEYS[2])")
# KEYS: fence, log, the rows to write with the record, the rows that must be there. ARGV: token, the number before, the
# record's number, the record, the rows. What is done already writes all the same, for only then WAIT waits for it.
_APPEND = _Script(
    _FENCE.format(fenced="'fenced'")
    + _LAST
    + """
if last and last[1] == ARGV[3] then
  redis.call('SET', KEYS[1], ARGV[1])
  return 'done'
end
if not last or last[1] ~= ARGV[2] then return 'lost' end
for number = #ARGV - 1, #KEYS do
  if redis.call('EXISTS', KEYS[number]) == 0 then return 'lost' end
end
for number = 5, #ARGV do redis.call('SET', KEYS[number - 2], ARGV[number]) end
redis.call('XADD', KEYS[2], ARGV[3], 'e', ARGV[4])
return 'done'
"""
)
_COMPACT = _Script(
    _FENCE.format(fenced="0")
    + """
redis.call('SET', KEYS[3], ARGV[3])
redis.call('XTRIM', KEYS[2], 'MINID', ARGV[2])
return 1
"""
)
_PUBLISH = _Script(
    _FENCE.format(fenced="0")
    + """
local before = redis.call('GET', KEYS[2])
redis.call('SET', KEYS[2], ARGV[2])
return before or ''
"""
)
_WITHDRAW = _Script(
    _FENCE.format(fenced="0")
    + """
local before = redis.call('GET', KEYS[2])
redis.call('DEL', KEYS[2])
return before or ''
"""
)
# The fence of a run that is half deleted is gone already.
_DELETE = _Script("""
local fence = redis.call('GET', KEYS[1])
if fence and fence ~= ARGV[1] then return 0 end
redis.call('DEL', unpack(KEYS, 2))
return 1
""")
_FORGET = _Script("return redis.call('DEL', KEYS[1])")
_REPORT = _Script("if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('SET', KEYS[2], ARGV[1]) end")


class ControlKeys:
    """The keys of one run that decide about it, whatever the run is called."""

    def __init__(self, prefix: str, run: str) -> None:
        tag = f"{{{prefix}:{quote(run, safe='')}}}"
        self.config, self.log, self.snapshot = f"{tag}:config", f"{tag}:log", f"{tag}:snapshot"
        self.owner, self.fence, self.claims = f"{tag}:owner", f"{tag}:fence", f"{tag}:claims"
        self.acknowledged = f"{tag}:acknowledged"

    @property
    def all(self) -> list[str]:
        return [self.config, self.log, self.snapshot, self.owner, self.claims, self.acknowledged]


class Scripts:
    """Raises redis-py's own errors. Every step may be repeated: done twice, it is done once."""

    def __init__(self, client: Client, durability: Durability) -> None:
        self._client, self._durability = client, durability

    def create(self, keys: ControlKeys, config: bytes) -> bool:
        """Returns whether there was no such run. Raises UnavailableError where it is made, and may be gone again."""
        found, is_reached = self._run_confirmed(_CREATE, [keys.config, keys.log], config)
        self._durability.check(is_reached, "a new run")
        return bool(found)

    def claim(self, keys: ControlKeys, token: str, owner: Owner, lease_ms: int, least: int) -> int | Owner | None:
        """Returns the claim's number, which is at least this; the owner where another process is that; None where there
        is no such run."""
        names = [keys.config, keys.owner, keys.fence, keys.claims]
        found = self._run(_CLAIM, names, token, owner.process, msgspec.json.encode(owner), lease_ms, least)
        if isinstance(found, bytes):
            return msgspec.json.decode(found, type=Owner)
        return int(found) or None

    def renew(self, keys: ControlKeys, token: str, owner: Owner, lease_ms: int, number: int) -> Outcome:
        """Extends the lease. number: of the record that the log reaches at least."""
        names = [keys.fence, keys.log, keys.owner]
        return Outcome(self._run(_RENEW, names, token, msgspec.json.encode(owner), lease_ms, number))

    def release(self, keys: ControlKeys, token: str) -> None:
        self._run(_RELEASE, [keys.fence, keys.owner], token)

    def append(
        self,
        keys: ControlKeys,
        token: str,
        number: int,
        record: bytes,
        rows: Mapping[str, bytes] | None = None,
        present: Sequence[str] = (),
    ) -> Outcome:
        """The record becomes the log's number `number`, after `number - 1`, and with it these keys get their values.

        present: other keys that it refers to. Without one of them nothing is done. All keys are on the log's server.
        """
        names = [keys.fence, keys.log, *(rows or ()), *present]
        arguments = [token, f"{number - 1}-0", f"{number}-0", record, *(rows.values() if rows else ())]
        found, is_reached = self._run_confirmed(_APPEND, names, *arguments)
        outcome = Outcome(found)
        return Outcome.UNCONFIRMED if outcome is Outcome.DONE and not is_reached else outcome

    def compact(self, keys: ControlKeys, token: str, number: int, snapshot: bytes) -> bool:
        """Sets the snapshot's description, and forgets the log before number `number`. Returns whether that was
        allowed."""
        return bool(self._run(_COMPACT, [keys.fence, keys.log, keys.snapshot], token, f"{number}-0", snapshot))

    def publish(self, keys: ControlKeys, token: str, key: str, value: bytes) -> bytes | None:
        """Sets a key of the same hash tag. Returns its value before; None where that was not allowed."""
        found = self._run(_PUBLISH, [keys.fence, key], token, value)
        return found if isinstance(found, bytes) else None

    def withdraw(self, keys: ControlKeys, token: str, key: str) -> bytes | None:
        """Removes a key of the same hash tag. Returns its value before; None where that was not allowed."""
        found = self._run(_WITHDRAW, [keys.fence, key], token)
        return found if isinstance(found, bytes) else None

    def delete(self, keys: ControlKeys, token: str) -> bool:
        """Removes all but the fence, so that nothing of a former owner's comes back; that one goes by `forget`. Returns
        whether that was allowed."""
        return bool(self._run(_DELETE, [keys.fence, *keys.all], token))

    def forget(self, keys: ControlKeys) -> None:
        """Raises UnavailableError where the run is gone, and may come back."""
        _, is_reached = self._run_confirmed(_FORGET, [keys.fence])
        self._durability.check(is_reached, "the end of a run")

    def report(self, keys: ControlKeys, acknowledged: bytes) -> None:
        """Says what a former owner had acknowledged; nothing where the run is gone."""
        self._run(_REPORT, [keys.config, keys.acknowledged], acknowledged)

    def _run_confirmed(self, script: _Script, keys: list[str], *arguments: Any) -> tuple[Any, bool]:
        """The script's answer, and whether what it wrote has its copies, in one round trip."""
        if self._durability.command is None:
            return self._run(script, keys, *arguments), True
        server = server_of(self._client, keys[0])
        for command in (("EVALSHA", script.digest), ("EVAL", script.text)):
            whole = (*command, len(keys), *keys, *arguments)
            [found], is_reached = execute(self._client, server, [whole], self._durability)
            if not isinstance(found, NoScriptError):
                break
        if isinstance(found, AskError):
            # Nothing was done there. The copies are asked for when it is done again.
            return self._run(script, keys, *arguments), False
        if isinstance(found, Exception):
            raise found
        return found, is_reached

    def _run(self, script: _Script, keys: list[str], *arguments: Any) -> Any:
        """Runs it by its digest, and by its text where the server does not know that yet.

        redis-py's own Script would load it into every server of a cluster then, and wait for one that hangs.
        """
        try:
            return cast(Any, self._client.evalsha(script.digest, len(keys), *keys, *arguments))
        except NoScriptError:
            return cast(Any, self._client.eval(script.text, len(keys), *keys, *arguments))
