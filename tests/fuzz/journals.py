"""What is stored, in files and in Redis: logs of events, the events and snapshots themselves, and tables of rows."""

from __future__ import annotations

import atexit
import shutil
import struct
import tempfile
import zlib
from functools import cache
from pathlib import Path
from random import Random

import msgspec
import numpy as np

from gristmill._wire.rows import from_rows
from gristmill_service.run.machine.codec import decode_events, decode_state, encode_state
from gristmill_service.storage import row_tables
from gristmill_service.storage.journal.event_log import EventLog
from tests.fuzz.mutate import changed_bytes, changed_document
from tests.fuzz.targets import Target
from tests.run.harness import Bench, group_rows

_HEADER = struct.Struct("<IIQ")
_BEGIN = 16
_SNAPSHOT, _RECORD = b"s", b"r"


@cache
def _bench() -> Bench:
    """A run that something of everything happened to."""
    bench = Bench(train_batch_size=1, critic_mini_batch_size=1)
    for uid in "abc":
        bench.submit(*group_rows(uid))
        bench.make_batches()
    bench.begin("d", "e")
    bench.run.abort_groups(0, ["d"], "why")
    bench.run.announce(3)
    return bench


def _events() -> list[bytes]:
    bench = _bench()
    return [*(_RECORD + record for record in bench.log.records), _SNAPSHOT + encode_state(bench.state)]


def _change_event(random: Random, data: bytes) -> bytes:
    if random.random() < 0.2:
        return data[:1] + changed_bytes(random, data[1:])
    document = changed_document(random, msgspec.msgpack.decode(data[1:], strict=False))
    try:
        return data[:1] + msgspec.msgpack.encode(document)
    except (OverflowError, UnicodeEncodeError, TypeError):
        return data[:1] + changed_bytes(random, data[1:])


def _read_event(data: bytes) -> None:
    if data[:1] == _SNAPSHOT:
        encode_state(decode_state(data[1:]))
    else:
        decode_events(data[1:])


def _logs() -> list[bytes]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        EventLog.create(directory)
        log = EventLog(directory)
        log.replay()
        for record in _events()[:6]:
            log.append(record[1:])
        log.close()
        return [(directory / "events-000000.log").read_bytes()]


def _change_log(random: Random, data: bytes) -> bytes:
    """Some with the checksum of a record made right again."""
    if random.random() < 0.5:
        return changed_bytes(random, data)
    found, at = bytearray(data), _BEGIN
    while at + _HEADER.size <= len(data):
        length, _, number = _HEADER.unpack_from(data, at)
        start = at + _HEADER.size
        if random.random() < 0.3 and length:
            payload = changed_bytes(random, data[start : start + length])
            header = _HEADER.pack(len(payload), zlib.crc32(payload, (number + 1) & 0xFFFFFFFF), number)
            return bytes(found[:at]) + header + payload + data[start + length :]
        at = start + length
    return changed_bytes(random, data)


@cache
def _directory() -> Path:
    # In memory: each input is a file, and its end may be cut, which is then made safe.
    found = Path(tempfile.mkdtemp(prefix="gristmill-fuzz-", dir="/dev/shm"))
    atexit.register(shutil.rmtree, found, ignore_errors=True)
    return found


def _read_log(data: bytes) -> None:
    path = _directory() / "events-000000.log"
    path.write_bytes(data)
    log = EventLog(_directory())
    try:
        replay = log.replay()
        for record in replay.records:
            decode_events(record)
    finally:
        log.close()
    assert path.stat().st_size <= len(data), "nothing is added by reading"


def _tables() -> list[bytes]:
    rows = [
        {
            "uid": uid,
            "sample": 0,
            "prompt_token_ids": [1, 2],
            "response_ids": [3],
            "loss_mask": [1],
            "reward": 1.0,
            "rollout_logprobs": [-1.0],
        }
        for uid in "ab"
    ]
    whole = from_rows(rows, step_wise=False)
    return [row_tables.encode(table).joined() for table in (whole, whole.take(np.array([1])))]


def _read_table(data: bytes) -> None:
    row_tables.decode(data)


LOGS = Target("journal_logs", _logs, _change_log, _read_log)
EVENTS = Target("events", _events, _change_event, _read_event)
TABLES = Target("redis_rows", _tables, changed_bytes, _read_table)
