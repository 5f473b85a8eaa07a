"""The atomic steps that change a run in Redis, as Lua scripts.

A step includes the run's *token*, which is chosen by the process that claims the run. With another token, a step does
nothing, so a former owner that wakes up cannot change anything. Every step is idempotent.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from hashlib import sha1
from itertools import repeat
from typing import Any, NamedTuple, cast

import msgspec
import redis
from redis.exceptions import AskError, NoScriptError

from gristmill_service.storage.redis.connection import REDIS_ERRORS, Client, server_of
from gristmill_service.storage.redis.keys import KEYS_AT_ONCE, RunKeys, damaged, reading

# The timeout of WAIT; less than that of a read from a socket.
_CONFIRM_MS = 1000
FIRST = "1-0"
"""The first entry of a log, which is not a record."""


class Durability(NamedTuple):
    """The required copies of a write, in addition to the copy in its server's memory.

    replicas: how many replicas must have a copy. on_disk: whether they and the server itself must have it on disk.
    """

    replicas: int = 0
    on_disk: bool = False

    @property
    def command(self) -> tuple[Any, ...] | None:
        """The command that waits for the copies of all earlier writes; None if the server's copy is sufficient."""
        if self.on_disk:
            return "WAITAOF", 1, self.replicas, _CONFIRM_MS
        return ("WAIT", self.replicas, _CONFIRM_MS) if self.replicas else None

    def is_reached(self, copies: Any) -> bool:
        """Returns whether enough copies exist. copies: the answer to the command."""
        if isinstance(copies, Exception):
            # A server that rejects the command usually rejected the write for the same reason.
            return False
        if self.on_disk:
            return bool(copies[0] >= 1 and copies[1] >= self.replicas)
        return bool(copies >= self.replicas)

    def __str__(self) -> str:
        copies = f"{self.replicas} replica{'s' * (self.replicas != 1)}"
        return f"the disks of Redis and of {copies}" if self.on_disk else copies


SERVER_ALONE = Durability()


class Owner(msgspec.Struct, frozen=True):
    """The process that owns a run, and its addresses. secret: sent by other processes."""

    process: str
    grpc_address: str
    http_url: str
    secret: str


class Outcome(Enum):
    """The result of a step that only the run's owner may take."""

    DONE = b"done"
    FENCED = b"fenced"
    """Another process has claimed the run in the meantime."""
    LOST = b"lost"
    """Redis has lost data: the log does not end with the owner's last entry, or a required key is missing."""
    EXISTS = b"exists"
    UNCONFIRMED = b""
    """The step was performed on the server, but too few copies are confirmed."""


class Script:
    """A script's text, and the digest by which servers cache it. Its first keys are the run's head, log, owner and
    config."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.digest = sha1(text.encode(), usedforsecurity=False).hexdigest()


def _fenced(text: str) -> Script:
    """Creates a step that only the run's owner may perform. The owner's token is the first argument."""
    fence = "if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return {'fenced'} end"
    return Script(f"{fence}\n{text}\nreturn {{'done'}}\n")


# ARGV: the description, the lease with which the process has reserved the run's name.
CREATE = Script(f"""
if redis.call('EXISTS', KEYS[1], KEYS[2], KEYS[4]) > 0 then return {{'exists'}} end
if redis.call('GET', KEYS[3]) ~= ARGV[2] then return {{'lost'}} end
redis.call('SET', KEYS[4], ARGV[1])
redis.call('HSET', KEYS[1], 'last', '{FIRST}')
redis.call('XADD', KEYS[2], '{FIRST}', 'e', '')
return {{'done'}}
""")
# A claim's number is larger than that of all earlier claims, even if a failover lost the last claims: tables of rows
# are named by it, and their names must never be reused. An unreadable lease has no owner, and an unreadable claim
# counts as missing.
_CLAIM = Script("""
local lease = redis.pcall('GET', KEYS[3])
local ok, owner = pcall(cjson.decode, type(lease) == 'string' and lease or '')
if ok and type(owner) == 'table' and owner.grpc_address and owner.http_url and owner.process
  and owner.process ~= ARGV[2] then return lease end
if redis.call('EXISTS', KEYS[1], KEYS[2], KEYS[4]) == 0 then return 0 end
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'hash' and kind ~= 'none' then return -1 end
if redis.call('HEXISTS', KEYS[1], 'deleted') == 1 then return 0 end
local before = tonumber(redis.call('HGET', KEYS[1], 'claim') or '0') or 0
local claim = string.format('%d', math.max(before < 2147483647 and before + 1 or 0, tonumber(ARGV[5])))
redis.call('HSET', KEYS[1], 'token', ARGV[1], 'claim', claim)
redis.call('SET', KEYS[3], ARGV[3], 'PX', ARGV[4])
return tonumber(claim)
""")
# ARGV: token, owner, milliseconds, the number of the record that the log must have. PEXPIRE works if memory is full.
_RENEW = _fenced("""
if redis.pcall('GET', KEYS[3]) == ARGV[2] then redis.call('PEXPIRE', KEYS[3], ARGV[3])
else redis.call('SET', KEYS[3], ARGV[2], 'PX', ARGV[3]) end
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
local number = last and string.match(last[1], '%d+') or '0'
if tonumber(number) < tonumber(ARGV[4]) then return {'lost'} end
local reported = redis.call('HGET', KEYS[1], 'reported')
if reported then
  redis.call('HDEL', KEYS[1], 'reported')
  return {'done', reported}
end
""")
RELEASE = _fenced("redis.call('DEL', KEYS[3])")
# KEYS: the rows to write with the record, the keys that must exist. ARGV: token, the previous entry, the record's
# entry, the record, the generation, the rows. The previous entry is empty if the log has no valid one. A repeated
# append writes again, because WAIT waits only for new writes. A short log may have had later entries.
APPEND = _fenced("""
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
local at = last and last[1] or ''
if at ~= ARGV[3] then
  if ARGV[2] ~= '' and at ~= ARGV[2] then return {'lost'} end
  for number = #ARGV, #KEYS do
    if redis.call('EXISTS', KEYS[number]) == 0 then return {'lost'} end
  end
  if ARGV[2] == '' then redis.call('DEL', KEYS[2])
  elseif redis.call('HGET', KEYS[1], 'last') ~= at then redis.call('XSETID', KEYS[2], at) end
  for number = 6, #ARGV do redis.call('SET', KEYS[number - 1], ARGV[number]) end
  redis.call('XADD', KEYS[2], ARGV[3], 'r', ARGV[4])
end
redis.call('HSET', KEYS[1], 'last', ARGV[3], 'generation', ARGV[5])
""")
# ARGV: token, a field of the head, its value.
NOTE = _fenced("redis.call('HSET', KEYS[1], ARGV[2], ARGV[3])")
# KEYS: the snapshot's pieces, of which a failover may have lost some. ARGV: token, the snapshot's description.
COMPACT = _fenced("""
for number = 5, #KEYS do
  if redis.call('EXISTS', KEYS[number]) == 0 then return {'lost'} end
end
redis.call('HSET', KEYS[1], 'snapshot', ARGV[2])
""")
TRIMMED_AT_ONCE = 1000
"""About how many entries TRIM removes with "~"."""
# Removes entries that a snapshot includes, and pieces of the one before, unless a failover has lost the snapshot. KEYS:
# the pieces. ARGV: token, the snapshot's description, the new first entry of the log, "=" to remove all before it.
TRIM = _fenced(f"""
if redis.call('HGET', KEYS[1], 'snapshot') ~= ARGV[2] then return {{'lost'}} end
if ARGV[4] == '=' then redis.call('XTRIM', KEYS[2], 'MINID', ARGV[3])
else redis.call('XTRIM', KEYS[2], 'MINID', '~', ARGV[3], 'LIMIT', {TRIMMED_AT_ONCE}) end
for number = 5, #KEYS do redis.call('UNLINK', KEYS[number]) end
""")
# KEYS: the staged batch, the published batch. ARGV: token, the nonce of the staged batch.
PUBLISH = _fenced("""
if redis.call('EXISTS', KEYS[5]) == 1 then
  redis.call('UNLINK', KEYS[6])
  redis.call('RENAME', KEYS[5], KEYS[6])
elseif redis.call('HGET', KEYS[6], 'nonce') ~= ARGV[2] then return {'lost'} end
""")
FREE = _fenced("redis.call('UNLINK', KEYS[5])")
# Marks the run as deleted: its head, which every step requires, becomes the mark, which stays until all other keys are
# removed. ARGV: token, a unique mark; a run that is marked already keeps its mark. A full server accepts the mark,
# because the script has removed keys before. The mark is written again, because WAIT waits only for new writes. The
# lease stays, so that other processes wait for this one before they finish the deletion.
DELETE = Script("""
local token, mark = redis.pcall('HGET', KEYS[1], 'token'), redis.pcall('HGET', KEYS[1], 'deleted')
if type(token) == 'string' and token ~= ARGV[1] then return {'fenced'} end
redis.call('DEL', KEYS[1], KEYS[2], KEYS[4])
redis.call('HSET', KEYS[1], 'deleted', type(mark) == 'string' and mark or ARGV[2])
return {'done'}
""")
# Removes keys unless they may be of a later run of the name. KEYS: the keys. ARGV: the mark of the deleted run.
REMOVE = Script("""
if redis.call('EXISTS', KEYS[1]) == 1 and redis.pcall('HGET', KEYS[1], 'deleted') ~= ARGV[1] then return {'fenced'} end
redis.call('UNLINK', unpack(KEYS, 5))
return {'done'}
""")
# Ends a deletion. ARGV: its mark.
FORGET = Script("""
if redis.pcall('HGET', KEYS[1], 'deleted') ~= ARGV[1] then return {'fenced'} end
redis.call('DEL', KEYS[1], KEYS[3])
return {'done'}
""")
# ARGV: the last record that a former owner acknowledged.
REPORT = Script("""
if redis.call('EXISTS', KEYS[4]) == 1 then redis.call('HSET', KEYS[1], 'reported', ARGV[1]) end
return {'done'}
""")
_HEADS = Script("""
local heads = {}
for index, key in ipairs(KEYS) do
  local head = redis.pcall('GETRANGE', key, 0, ARGV[1] - 1)
  if type(head) == 'string' then heads[index] = {head, redis.call('STRLEN', key)} else heads[index] = {'', 0} end
end
return heads
""")


class Scripts:
    """Runs scripts. Raises errors of redis-py."""

    def __init__(self, client: Client, durability: Durability) -> None:
        self._client, self._durability = client, durability

    def step(self, script: Script, keys: RunKeys, *arguments: Any, more: Sequence[str | bytes] = ()) -> Outcome:
        """Performs a step. more: keys of the run in addition to those of all scripts."""
        return Outcome(self._run(script, [*_names(keys), *more], *arguments)[0])

    def confirmed(self, script: Script, keys: RunKeys, *arguments: Any, more: Sequence[str | bytes] = ()) -> Outcome:
        """Performs a step and waits for its copies, in one round trip. Returns UNCONFIRMED if too few copies are
        confirmed in time."""
        confirm, names = self._durability.command, [*_names(keys), *more]
        if confirm is None:
            return self.step(script, keys, *arguments, more=more)
        server = server_of(self._client, keys.head)
        for command in (("EVALSHA", script.digest), ("EVAL", script.text)):
            answer, copies = self._pipelined(server, [(*command, len(names), *names, *arguments), confirm])
            if not isinstance(answer, NoScriptError):
                break
        if isinstance(answer, AskError):
            # The step was not performed. A repetition waits for the copies.
            answer, copies = self._run(script, names, *arguments), answer
        if isinstance(answer, Exception):
            raise answer
        outcome = Outcome(answer[0])
        is_reached = outcome is not Outcome.DONE or self._durability.is_reached(copies)
        return outcome if is_reached else Outcome.UNCONFIRMED

    def claim(self, keys: RunKeys, token: str, owner: Owner, lease_ms: int, least: int) -> int | Owner | None:
        """Claims a run. Returns the claim's number, which is at least `least`; the owner if another process owns the
        run; None if the run does not exist or is deleted. Raises InvalidArgumentError if the run's head is damaged."""
        lease = msgspec.json.encode(owner)
        answer = self._run(_CLAIM, _names(keys), token, owner.process, lease, lease_ms, least)
        if isinstance(answer, bytes):
            with reading(keys.owner):
                return msgspec.json.decode(answer, type=Owner)
        if answer < 0:
            raise damaged(keys.head, "it is of another type")
        return int(answer) or None

    def renew(
        self, server: redis.Redis, owner: Owner, lease_ms: int, claims: Sequence[tuple[RunKeys, str, int]]
    ) -> list[tuple[Outcome, bytes] | Exception]:
        """Extends the leases of runs on one server, in one round trip. claims: each run's token, and the record that
        its log must have. Returns each run's report of a former owner."""
        lease, answers = msgspec.json.encode(owner), list[tuple[Outcome, bytes] | Exception]()
        calls = [(_names(keys), token, lease, lease_ms, last) for keys, token, last in claims]
        # The first call sends the text, so that a server that has not cached the script needs no further round trips.
        scripts = [("EVAL", _RENEW.text), *repeat(("EVALSHA", _RENEW.digest), len(calls) - 1)]
        commands = [
            (*script, len(names), *names, *arguments)
            for script, (names, *arguments) in zip(scripts, calls, strict=True)
        ]
        for call, answer in zip(calls, self._pipelined(server, commands), strict=True):
            if isinstance(answer, NoScriptError | AskError):
                try:
                    answer = self._run(_RENEW, *call)
                except REDIS_ERRORS as error:
                    answer = error
            answers.append(answer if isinstance(answer, Exception) else (Outcome(answer[0]), b"".join(answer[1:])))
        return answers

    def heads(self, names: Sequence[str], nbytes: int) -> list[tuple[bytes, int]]:
        """Returns the first bytes and the length of values of one run; empty for missing keys and for other types."""
        return [
            (head, length)
            for at in range(0, len(names), KEYS_AT_ONCE)
            for head, length in self._run(_HEADS, names[at : at + KEYS_AT_ONCE], nbytes)
        ]

    def _pipelined(self, server: redis.Redis, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Sends commands to one of the client's servers. Returns its answers, each of which may be an error."""
        pipeline: Any = server.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        try:
            return cast(list[Any], pipeline.execute(raise_on_error=False))
        except (redis.ConnectionError, redis.TimeoutError):
            if isinstance(self._client, redis.RedisCluster):
                # The client detects failed nodes only in its own commands.
                with suppress(*REDIS_ERRORS):
                    cast(Any, self._client).nodes_manager.initialize()
            raise

    def _run(self, script: Script, names: Sequence[str | bytes], *arguments: Any) -> Any:
        """Runs a script by its digest, or by its text if the server has not cached it.

        The `Script` class of redis-py would load it into every server of a cluster, and wait for a server that hangs.
        """
        try:
            return cast(Any, self._client.evalsha(script.digest, len(names), *names, *arguments))
        except NoScriptError:
            return cast(Any, self._client.eval(script.text, len(names), *names, *arguments))


def _names(keys: RunKeys) -> list[str]:
    return [keys.head, keys.log, keys.owner, keys.config]
