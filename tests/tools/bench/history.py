"""What a run costs that has been going on for months: memory, and its log.

python -m tests.tools.bench.history --groups 30000000 --tail 256    # a journal with closed groups, and MB of events
python -m tests.tools.bench.history --messages 30000                # bytes in use by each message of rows
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gristmill import RolloutClient
from gristmill._wire.steps import TrajectoryKey
from gristmill_service.config import RunConfig, parse_config
from gristmill_service.run.machine.answers import Position
from gristmill_service.run.machine.archived_groups import digests_of
from gristmill_service.run.machine.codec import encode_event, record_of, snapshot_of
from gristmill_service.run.machine.events import (
    Acknowledged,
    BatchFreed,
    BatchPublished,
    BatchSealed,
    Event,
    GroupKey,
    GroupsAdmitted,
    NewGroup,
    PositionCommitted,
    RowRef,
    RowsStored,
    StoredRow,
)
from gristmill_service.run.machine.state import State
from gristmill_service.settings import Settings
from gristmill_service.storage.journal.run_store import JournalRunStore
from tests.on_loop import Service, loop, on_loop
from tests.storage.tables import any_table
from tests.tools.bench.processes import cpu_s, served

GROUPS, SAMPLES, RUN, AT_ONCE = 1000, 8, "months", 1 << 20
"""The groups of a batch, the trajectories of a group, the run's name, and the groups that are archived at once."""
WATCHED_S = 60.0


def config() -> RunConfig:
    return parse_config(
        {
            "train_batch_size": GROUPS,
            "policy_mini_batch_size": GROUPS,
            "n_samples_per_prompt": SAMPLES,
            "max_buffered_batches": 8,
            "micro_batch": {"max_tokens": 65_536},
        }
    )


def state_of(groups: int, run_id: str) -> State:
    """A run of which that many groups are in batches that are trained, committed and freed."""
    state, batches = State.initial(config(), run_id), groups // GROUPS
    archive = state.closed.archive
    for first in range(0, batches * GROUPS, AT_ONCE):
        numbers = range(first, min(first + AT_ONCE, batches * GROUPS))
        digests = digests_of(run_id, (GroupKey(0, f"{number:036d}") for number in numbers))
        archive.add(digests, [number // GROUPS for number in numbers])
        while pair := archive.large_pair():
            archive.replace(pair, pair[0].merged(pair[1]))
    state.prompts, state.freed, state.groups_sealed = [GROUPS] * batches, batches, batches * GROUPS
    model = state.models["policy"]
    model.next, model.committed, model.furthest = [Position(batches)], Position(batches), Position(batches)
    return state


def batch_of_events(batch: int) -> Iterator[list[Event]]:
    """The records of one more batch, in which each trajectory comes in a message of its own."""
    keys = tuple(GroupKey(0, f"{batch * GROUPS + index:036d}") for index in range(GROUPS))
    yield [GroupsAdmitted(tuple(NewGroup(key, SAMPLES) for key in keys), 0.0)]
    digest = os.urandom(16)
    for number, key in enumerate(keys):
        for sample in range(SAMPLES):
            ref = RowRef(batch * GROUPS * SAMPLES + number * SAMPLES + sample, 0)
            trajectory = TrajectoryKey(0, key.uid, sample)
            yield [RowsStored((StoredRow(trajectory, 0, 0, True, ref, digest, 4000, 500, batch, 1.0, tokens=900),))]
    yield [BatchSealed(batch, keys, batch)]
    yield [BatchPublished(batch, {"policy": 1}, 1 << 20)]
    position = Position(batch + 1)
    yield [Acknowledged("policy", 0, position), PositionCommitted("policy", position), BatchFreed(batch)]


def make(directory: Path, groups: int, tail_bytes: int) -> None:
    """Makes a journal with a run of that many closed groups in its snapshot, and of that many bytes of events."""
    store = JournalRunStore(directory, "never")
    log = store.create(RUN, config().model_dump_json().encode())
    log.replay()
    before, state = in_use(), state_of(groups, log.run_id)
    print(f"a closed group: {(in_use() - before) / max(groups, 1):.1f} B in use", flush=True)
    batch = first = state.freed
    snapshot = snapshot_of(state)
    del state
    log.compact(log.end, snapshot)
    print(f"snapshot: {log.log_bytes / 1e6:.0f} MB, {log.log_bytes / max(groups, 1):.1f} B a group", flush=True)
    before = log.end.nbytes
    while log.end.nbytes - before < tail_bytes:
        for events in batch_of_events(batch):
            log.append(record_of([encode_event(event) for event in events]), {})
        log.flush()
        batch += 1
    print(f"events: {(log.end.nbytes - before) / 1e6:.0f} MB of {(batch - first) * GROUPS} groups", flush=True)
    log.close()
    store.close()


def ready_after_kill(journal: Path) -> tuple[float, float]:
    """Seconds from the start of a service to its answers, after the one before was killed, and of processor time."""
    flags = ["--journal-dir", str(journal)]
    with served(flags) as first:
        first.process.kill()
        first.process.wait()
    begin = time.perf_counter()
    with served(flags) as again:
        wait_for_run(again.http_url)
        ready, cpu = time.perf_counter() - begin, cpu_s(again.process.pid)
        again.process.kill()
        again.process.wait()
    return ready, cpu


def wait_for_run(http_url: str) -> None:
    import urllib.error
    import urllib.request

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        try:
            opener.open(f"{http_url}/v1/runs/{RUN}").close()
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            time.sleep(0.01)
        else:
            return


class Heartbeat:
    """Beats on the loop every few milliseconds. gaps: how much later than that each came."""

    def __init__(self) -> None:
        self.gaps: list[float] = []
        self._task = on_loop(self._start)

    async def _start(self) -> asyncio.Task[None]:
        return loop().create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.002)
            self.gaps.append(time.perf_counter() - before - 0.002)

    def stop(self) -> float:
        """Returns the longest gap."""
        loop().call_soon_threadsafe(self._task.cancel)
        return max(self.gaps)


def watched(run: object, prefix: str, goes_on: Callable[[], bool]) -> tuple[int, float, float, float]:
    """Begins a group after the other. Returns how many, the longest gap on the loop, and the median and the longest
    time of a call."""
    heartbeat, times = Heartbeat(), list[float]()
    while goes_on():
        begin = time.perf_counter()
        run.begin_groups(0, [f"{prefix}{len(times)}"])  # type: ignore[attr-defined]
        times.append(time.perf_counter() - begin)
        run.abort_groups(0, [f"{prefix}{len(times) - 1}"], "bench")  # type: ignore[attr-defined]
        time.sleep(0.005)
    times.sort()
    return len(times), heartbeat.stop(), times[len(times) // 2], times[-1]


def measure(journal: Path) -> None:
    """Prints how long calls take beside a snapshot, and after it."""
    settings = {"journal_dir": journal, "grpc_address": "127.0.0.1:0", "http_address": "127.0.0.1:0"}
    service = Service(Settings.model_validate(settings))
    begin = time.perf_counter()
    service.start()
    while True:
        try:
            run = service.runs.get(RUN)
            break
        except Exception:  # noqa: BLE001 - it is being recovered
            time.sleep(0.05)
    print(f"recovered in this process: {time.perf_counter() - begin:.1f} s", flush=True)
    log, compaction = run._target._log, run._target._writer.compaction
    if not log.is_long:
        print("the log is not long: give it a longer --tail")
        service.stop()
        return
    before = log._snapshot
    begin, end = time.perf_counter(), time.perf_counter() + 600
    report("beside a snapshot", watched(run, "a", lambda: log._snapshot is before and time.perf_counter() < end))
    took = time.perf_counter() - begin
    print(f"the snapshot took {took:.1f} s; failed: {compaction.failed!r}", flush=True)
    end = time.perf_counter() + min(took, WATCHED_S)
    report(
        "while the events before it are removed",
        watched(run, "b", lambda: log._has_replaced and time.perf_counter() < end),
    )
    end = time.perf_counter() + min(took, WATCHED_S)
    report("as control, after it", watched(run, "c", lambda: time.perf_counter() < end))
    service.runs.create("control", config())
    known = run.status().groups_archived
    seconds: dict[str, list[float]] = {RUN: [], "control": []}
    for number in range(25):
        for name, of_run in seconds.items():
            with RolloutClient(service.grpc_address, name) as client:
                uids = [f"d{number}-{index}" for index in range(GROUPS)]
                begin = time.perf_counter()
                client.begin_groups(uids)
                of_run.append(time.perf_counter() - begin)
                service.runs.get(name).abort_groups(0, uids, "bench")
    months, none = (1000 * statistics.median(of_run) for of_run in seconds.values())
    print(
        f"begin_groups of {GROUPS} by a client: {months:.1f} ms with {known} archived groups, {none:.1f} ms with none, "
        f"the medians of 25; {months / none:.2f} times"
    )
    service.stop()


def report(what: str, measured: tuple[int, float, float, float]) -> None:
    calls, gap, median, longest = measured
    print(
        f"{what}: longest gap on the loop {1000 * gap:.1f} ms; {calls} appends, median {1000 * median:.1f} ms, "
        f"longest {1000 * longest:.1f} ms",
        flush=True,
    )


def in_use() -> int:
    """Bytes in use of glibc, mapped ones too, and of Python's own allocator, in blocks of 64 bytes on the average."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo
    allocated = libc.mallinfo2()
    return int(allocated.uordblks) + int(allocated.hblkhd) + 64 * sys.getallocatedblocks()


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def messages(count: int) -> None:
    """Prints the bytes in use by each message of rows that was written and read once, and is removed."""
    with journal_in(None) as directory:
        store = JournalRunStore(directory)
        log = store.create("run", b"{}")
        log.replay()
        small = any_table(0, rows=1, tokens=500)

        def send(first: int, count: int) -> None:
            for number in range(first, first + count):
                log.append(b"rows", {number: small})
                log.get(number)
                log.remove([number])
                if number % 1000 == 999:
                    log.flush()

        send(0, 2000)
        before = in_use()
        send(2000, count)
        print(f"a message of rows: {(in_use() - before) / count:.1f} B in use, over {count} messages")
        log.close()
        store.close()


@contextmanager
def journal_in(directory: Path | None) -> Iterator[Path]:
    if directory is not None:
        yield directory
        return
    with tempfile.TemporaryDirectory() as made:
        yield Path(made) / "journal"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=0)
    parser.add_argument("--tail", type=int, default=256, help="MB of events after the snapshot")
    parser.add_argument("--directory", type=Path, help="of a journal, which is made there, or was made before")
    parser.add_argument("--messages", type=int, default=0)
    given = parser.parse_args()
    if given.messages:
        messages(given.messages)
    if given.groups or given.directory:
        with journal_in(given.directory) as journal:
            if given.groups:
                make(journal, given.groups, given.tail << 20)
            ready, cpu = ready_after_kill(journal)
            print(f"ready after kill -9: {ready:.1f} s, {cpu:.1f} s of processor time", flush=True)
            measure(journal)


if __name__ == "__main__":
    main()
