"""What a service with a journal makes of its own death and of its disk: it goes on, or refuses."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.api.apis import Refused
from tests.faults.services import (
    COMMAND,
    CONFIG,
    Service,
    Services,
    check,
    eventually,
    group,
    patiently,
    train,
)
from tests.redis.servers import free_port

FREE = ["--grpc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0"]


def in_journal(directory: Path, *more: str) -> list[str]:
    """The flags of a service with a journal in this directory, and its shards next to it."""
    (directory / "shards").mkdir(parents=True, exist_ok=True)
    return ["--journal-dir", str(directory / "journal"), "--shared-memory-dir", str(directory / "shards"), *more]


def refused_start(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *FREE, *flags], capture_output=True, text=True, timeout=60, check=False)


def test_positions_incarnations_and_a_withdrawn_batch_outlive_the_process(
    services: Services, tmp_path: Path, run: str
) -> None:
    flags = in_journal(tmp_path)
    [service] = services.start(1, *flags)
    service.grpc.create(run, {**CONFIG, "dp_size": 2})
    service.grpc.submit(run, [each for uid in "abcd" for each in group(uid)])
    service.grpc.batch(run, 1, wait_s=20)
    resumed = service.http.call(
        "POST", f"/runs/{run}/resume", {"launch": "smaller", "position": None, "dp_size": 1}
    ).json()
    service.kill()
    [service] = services.start(1, *flags)
    assert service.grpc.batch(run, 1, wait_s=20)["plan"]["dp_size"] == 1
    assert service.grpc.shard(run, 0, incarnation=resumed["incarnation"])["state"] == "published"
    with pytest.raises(Refused, match="superseded"):
        service.grpc.shard(run, 0, incarnation=1)
    train(service.grpc, run, 0, commit=False)
    service.kill()
    [service] = services.start(1, *flags)
    assert service.grpc.shard(run, 0)["position"]["batch"] == 1
    assert service.grpc.get(run)["batches_freed"] == 0, "what no checkpoint holds stays"
    assert service.stop() == 0
    [service] = services.start(1, *flags)
    assert service.grpc.shard(run, 0)["position"]["batch"] == 1
    assert len(list((tmp_path / "shards").glob("*.lock"))) == 1, "shards of the dead are removed by those after them"


def test_a_deleted_run_stays_deleted_and_its_name_is_free(services: Services, tmp_path: Path, run: str) -> None:
    flags = in_journal(tmp_path)
    [service] = services.start(1, *flags)
    service.grpc.create(run, CONFIG)
    service.grpc.submit(run, group("a"))
    service.grpc.delete(run)
    service.grpc.create(f"{run}-kept", CONFIG)
    service.kill()
    [service] = services.start(1, *flags)
    assert service.grpc.names() == [f"{run}-kept"]
    service.grpc.create(run, CONFIG)
    assert service.grpc.submit(run, group("a")) == ["accepted"] * 2


def test_a_torn_tail_is_cut_and_reported_and_the_rest_is_there(services: Services, tmp_path: Path, run: str) -> None:
    flags = in_journal(tmp_path)
    [service] = services.start(1, *flags)
    service.grpc.create(run, CONFIG)
    service.grpc.submit(run, group("a"))
    service.grpc.submit(run, group("b", response_ids=[9, 9], reward=None))
    service.kill()
    [wal] = (tmp_path / "journal").glob("run-*/journal.sqlite-wal")
    os.truncate(wal, wal.stat().st_size - 5)
    [service] = services.start(1, *flags)
    assert "torn tail cut" in service.log
    assert service.grpc.submit(run, group("a")) == ["duplicate"] * 2
    assert service.grpc.submit(run, group("b")) == ["accepted"] * 2, "of what was not whole nothing is known"
    assert service.grpc.batch(run, 0, wait_s=20)["state"] == "published"


@pytest.mark.parametrize("damage", ["cut", "removed"])
def test_a_database_that_is_damaged_under_the_service_stops_its_run_with_the_reason(
    services: Services, tmp_path: Path, run: str, damage: str
) -> None:
    [service] = services.start(1, *in_journal(tmp_path))
    service.grpc.create(run, CONFIG)
    service.grpc.submit(run, [*group("a"), *group("b")[:-1]])
    for name in ("journal.sqlite", "journal.sqlite-wal"):
        [path] = (tmp_path / "journal").glob(f"run-*/{name}")
        if damage == "cut":
            os.truncate(path, 0)
        else:
            path.unlink()
    with suppress(Refused):
        service.grpc.submit(run, group("b")[-1:])
    with pytest.raises(Refused, match=r"cannot be read: .*; restore it") as refused:
        patiently(lambda: service.grpc.batch(run, 0, wait_s=20))
    check(refused.value, "FAILED_PRECONDITION")
    service.grpc.delete(run)
    service.grpc.create(run, CONFIG)
    assert service.grpc.submit(run, group("a")) == ["accepted"] * 2


def test_a_second_service_in_the_same_directory_waits_for_the_first(services: Services, tmp_path: Path) -> None:
    flags, http = in_journal(tmp_path), f"127.0.0.1:{free_port()}"
    [first] = services.start(1, *flags)
    second = services.begin(*flags, "--http-address", http)

    def probe(path: str) -> httpx.Response:
        return httpx.get(f"http://{http}{path}", timeout=30, trust_env=False)

    answer = eventually(lambda: probe("/readyz"), "the second service answers")
    assert answer.status_code == 503
    assert (
        f"waits for its store: journal_dir: {tmp_path / 'journal'} is in use by another"
        in answer.json()["error"]["message"]
    )
    assert probe("/healthz").status_code == 200
    assert first.trouble == ""
    first.stop()
    assert second.ready().trouble == ""


class TestItDoesNotStart:
    def test_in_a_directory_that_it_may_not_use(self, tmp_path: Path) -> None:
        (tmp_path / "journal").write_text("a file")
        ended = refused_start(*in_journal(tmp_path))
        assert (ended.returncode, len(ended.stderr.strip().splitlines())) == (2, 1)
        assert "journal_dir" in ended.stderr


def test_a_run_that_a_newer_version_wrote_is_set_aside_untouched_and_the_others_serve(
    services: Services, tmp_path: Path, run: str
) -> None:
    flags = in_journal(tmp_path)
    [service] = services.start(1, *flags)
    service.grpc.create(run, CONFIG)
    service.stop()
    [path] = (tmp_path / "journal").glob("run-*/journal.sqlite")
    content = path.read_bytes()
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE run SET format = 9")
    newer = path.read_bytes()
    [service] = services.start(1, *flags)
    with pytest.raises(Refused) as refused:
        service.grpc.get(run)
    assert refused.value.code == "FAILED_PRECONDITION"
    assert "has format 9 and this version reads 3; use the version that wrote it" in str(refused.value.message)
    assert path.read_bytes() == newer, "what is refused is left as it was"
    service.grpc.create(f"{run}-other", CONFIG)
    assert service.grpc.names() == [run, f"{run}-other"]
    service.stop()
    path.write_bytes(content)
    [service] = services.start(1, *flags)
    assert service.grpc.get(run)["groups_open"] == 0


class TestTheDiskIsFull:
    SIZE = 40 << 20

    @pytest.fixture
    def disk(self, tmp_path: Path) -> Iterator[Path]:
        """A small file system of its own."""
        path = tmp_path / "disk"
        path.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={self.SIZE}", "tmpfs", str(path)], capture_output=True, check=False
        )
        if mounted.returncode:
            pytest.skip("mounting a small file system needs root")
        with ExitStack() as after:
            after.callback(subprocess.run, ["umount", "-l", str(path)], check=True)
            yield path

    @pytest.fixture
    def service(self, services: Services, tmp_path: Path, disk: Path, run: str) -> Service:
        (tmp_path / "shards").mkdir()
        journal = ["--journal-dir", str(disk / "journal"), "--shared-memory-dir", str(tmp_path / "shards")]
        [service] = services.start(1, *journal)
        service.grpc.create(run, {**CONFIG, "max_buffered_batches": 1000, "max_staleness": 100_000})
        return service

    def fill(self, service: Service, run: str, rows: int = 100_000, prefix: str = "u") -> int:
        """Submits groups until one is refused for 3 s: a checkpoint may still make space. Returns how many were
        accepted."""
        long = {"response_ids": list(range(rows)), "loss_mask": [1] * rows}
        for number in range(10_000):
            try:
                patiently(partial(service.grpc.submit, run, group(f"{prefix}-{number}", **long)), timeout_s=3)
            except Refused as refused:
                check(refused, "UNAVAILABLE")
                message = refused.message
                break
        assert "is full; free or add space" in message
        return number

    def test_rows_are_refused_with_the_remedy_and_acknowledgements_make_room(self, service: Service, run: str) -> None:
        taken = self.fill(service, run)
        assert taken > 10
        assert "is full" in service.trouble
        for batch in range(taken // 2):
            train(service.http, run, batch)
        assert service.grpc.get(run)["batches_freed"] == taken // 2
        eventually(lambda: service.trouble == "", "it is ready")
        assert service.grpc.submit(run, group("more")) == ["accepted"] * 2

    def test_killed_when_full_it_starts_again_and_goes_on(
        self, services: Services, service: Service, tmp_path: Path, disk: Path, run: str
    ) -> None:
        taken = self.fill(service, run)
        data = service.grpc.read(run, 0, 0, 0)
        service.kill()
        journal = ["--journal-dir", str(disk / "journal"), "--shared-memory-dir", str(tmp_path / "shards")]
        [again] = services.start(1, *journal)
        for batch in range(taken // 2):
            trained = train(again.grpc, run, batch)
            assert batch or trained == data
        eventually(lambda: again.trouble == "", "it is ready")
        assert again.grpc.submit(run, group("more")) == ["accepted"] * 2

    def test_room_that_another_gives_back_is_found_without_a_restart(
        self, service: Service, disk: Path, run: str
    ) -> None:
        other = disk / "other"
        with other.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, self.SIZE // 2)
        taken = self.fill(service, run)
        other.unlink()
        assert patiently(lambda: service.grpc.submit(run, group("more"))) == ["accepted"] * 2
        eventually(lambda: service.trouble == "", "it is ready")
        assert service.grpc.get(run)["rows_accepted"] == 2 * taken + 2


def test_a_clock_that_is_set_is_no_reason_to_time_groups_out(services: Services, tmp_path: Path, run: str) -> None:
    """Time is counted while it serves; what a clock says, and for how long nobody served, is not asked."""
    flags = in_journal(tmp_path)
    [service] = services.start(1, *flags)
    service.grpc.create(run, {**CONFIG, "group_timeout_s": 4.0})
    service.grpc.submit(run, group("a")[:1])
    service.kill()
    for path in (tmp_path / "journal").rglob("*"):
        os.utime(path, (0, 0))
    time.sleep(4.0)
    [service] = services.start(1, *flags)
    assert service.grpc.submit(run, group("a")[1:]) == ["accepted"]
    service.grpc.begin(run, ["late"])
    begun = time.monotonic()
    eventually(lambda: service.grpc.get(run)["groups_dropped"] == {"timeout": 1}, "the late one is dropped")
    assert time.monotonic() - begun > 3.5


def test_the_journal_is_one_process_also_when_that_forked(services: Services, tmp_path: Path) -> None:
    """Its lock goes with it, whatever it had opened."""
    flags = in_journal(tmp_path)
    [service] = services.start(1, *flags)
    service.kill()
    with (tmp_path / "journal" / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_neither_threads_nor_files_nor_memory_grow_with_runs_that_come_and_go(
    services: Services, tmp_path: Path, run: str
) -> None:
    [service] = services.start(1, *in_journal(tmp_path))

    def used() -> tuple[int, int]:
        proc = Path(f"/proc/{service.process.pid}")
        return len(list((proc / "fd").iterdir())), len(list((proc / "task").iterdir()))

    def live(number: int) -> None:
        name = f"{run}-{number}"
        service.grpc.create(name, CONFIG)
        service.grpc.submit(name, [*group("a"), *group("b")])
        train(service.grpc, name, 0)
        service.grpc.delete(name)

    for number in range(10):
        live(number)
    before = used()
    for number in range(10, 60):
        live(number)
    after = used()
    # Pools start threads, and those open connections, when more is to be done at once, which may be meanwhile.
    assert after[0] <= before[0] + 20
    assert after[1] <= before[1] + 20
    assert httpx.get(f"{service.http_url}/healthz", trust_env=False).status_code == 200
