"""A service's runs on Redis, in this process: what becomes of them, and of what they left there, when owners change."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gristmill._wire.steps import Steps
from gristmill.errors import (
    FailedPreconditionError,
    GristmillError,
    ResourceExhaustedError,
    UnavailableError,
)
from gristmill_service.pipeline.scheduling.plan import ShardAddress
from gristmill_service.run.machine.answers import BatchState, Position
from gristmill_service.run.machine.decisions.resume import Checkpoint
from gristmill_service.storage.redis.run_log import RedisRunLog
from gristmill_service.storage.redis.run_store import FORMAT
from gristmill_service.storage.run_store import LogEnd, LogLostError, OwnedElsewhereError
from tests.faults.replicas import CREATED, Join, Replica, keys, published
from tests.faults.services import uids_of
from tests.redis.cluster import RedisCluster
from tests.redis.proxy import Proxy
from tests.redis.servers import RedisServer, wait_until
from tests.run.harness import group_rows, table


def test_a_run_that_cannot_be_read_keeps_no_other_from_being_taken_over(server: RedisServer, join: Join) -> None:
    first = join(server.url, "first")
    for name in ("a", "b"):
        first.runs.create(name, CREATED)
    first.die()
    config = first.run_store._keys("a").config
    client = server.client()
    described = client.get(config)
    assert isinstance(described, bytes)
    client.set(config, described.replace(f'"format":{FORMAT}'.encode(), b'"format":9'))
    second = join(server.url, "second")
    wait_until(lambda: [run.name for run in second.runs.own()] == ["b"], "the other is taken over")
    with pytest.raises(FailedPreconditionError, match="use the version that wrote it"):
        second.runs.get("a")
    assert list(second.runs.unreadable) == ["a"]


@pytest.mark.parametrize("name", ["config", "head", "log"])
def test_a_damaged_run_is_set_aside_and_deleted_and_others_go_on(server: RedisServer, join: Join, name: str) -> None:
    first = join(server.url, "first")
    for run in ("a", "b"):
        first.runs.create(run, CREATED)
        first.runs.get(run).submit(table(*group_rows("a")))
    key = getattr(first.run_store._keys("a"), name)
    first.die()
    server.client().unlink(key)
    server.client().sadd(key, "another type")
    second = join(server.url, "second")
    wait_until(lambda: "a" in second.runs.unreadable, "it is set aside")
    assert (
        f"{key} in Redis is damaged: it is of another type; restore it, or delete the run"
        in second.runs.unreadable["a"]
    )
    with pytest.raises(FailedPreconditionError, match="is damaged"):
        second.runs.get("a")
    wait_until(lambda: published(second, "b", 0), "the other goes on")
    second.runs.delete("a")
    assert second.runs.names() == ["b"]
    second.runs.create("a", CREATED)
    assert second.runs.get("a").status().generation == 1


def test_a_log_that_is_gone_is_a_rollback(server: RedisServer, join: Join) -> None:
    first = join(server.url, "first")
    first.runs.create("run", CREATED)
    first.runs.get("run").submit(table(*group_rows("a")))
    wait_until(lambda: published(first, "run", 0), "it is made")
    first.close()
    server.client().unlink(first.run_store._keys("run").log)
    second = join(server.url, "second")
    status = second.runs.get("run").status()
    assert (status.generation, status.batches_sealed) == (2, 0)
    second.runs.get("run").submit(table(*group_rows("a")))
    wait_until(lambda: published(second, "run", 0), "it goes on")
    wait_until(lambda: len([key for key in keys(server, "run") if ":rows:" in key]) == 1, "rows of before are swept")


@pytest.mark.parametrize("field", ["policy/0/0/0", "policy/0/0", "plan", "format"])
def test_a_damaged_shard_is_built_again(server: RedisServer, join: Join, field: str) -> None:
    one = join(server.url)
    one.runs.create("run", CREATED)
    run = one.runs.get("run")
    run.submit(table(*group_rows("a")))
    wait_until(lambda: published(one, "run", 0), "it is made")
    view = run.shard("policy", 0, None, 0)
    before = b"".join(run.read_shard(0, view.address))
    batch, client = one.run_store._keys("run").batch(0), server.client()
    value: Any = client.hget(batch, field)
    client.hset(batch, field, bytes([value[0] ^ 1]) + value[1:])
    run._builder.plans.clear()

    def reads() -> tuple[bytes, bytes]:
        plan = run.batch(0).plan
        address = run.shard("policy", 0, None, 0).address
        frames = b"".join(run.read_shard_frames(0, address))
        assert b"".join(run.read_shard(0, address)) == before
        return plan, frames

    def is_whole() -> bool:
        with suppress(UnavailableError, AttributeError, TypeError):
            reads()
            return bool(client.hget(batch, field) == value)
        return False

    wait_until(is_whole, "it is built again, to the same bytes")


def test_what_a_run_holds_is_counted_without_padding(server: RedisServer, join: Join) -> None:
    one = join(server.url)
    # One prompt is long: the whole file is beyond the bound, what rests of it is not.
    bounds = {"max_buffered_bytes": 100_000, "max_buffered_batches": 10, "micro_batch": {"size": 8}}
    one.runs.create("run", {**CREATED, "n_samples_per_prompt": 8, **bounds})
    run = one.runs.get("run")
    rows = group_rows("a", 8)
    rows[0]["prompt_token_ids"] = list(range(4000))
    run.submit(table(*rows))
    wait_until(lambda: published(one, "run", 0), "it is made")
    status, client = run.status(), server.client()
    address = ShardAddress("policy", 0, 0)
    assert one.store.locate("run", 0, address).size > 100_000
    [batch] = [key for key in keys(server, "run") if ":batch:" in key]
    values: Any = client.hvals(batch)
    assert status.shard_bytes <= sum(map(len, values)) < status.shard_bytes + 20 * len(values) < 50_000
    assert status.groups_room > 0


def test_what_a_dead_owner_had_freed_but_not_removed_goes_when_the_run_is_taken_over(
    server: RedisServer, join: Join
) -> None:
    first = join(server.url, "first")
    first.runs.create("run", CREATED)
    run = first.runs.get("run")
    run.submit(table(*group_rows("a")))
    wait_until(lambda: published(first, "run", 0), "it is made")

    def dead(*_: object) -> None:
        raise UnavailableError("dead")

    first.store.free = dead  # type: ignore[method-assign, assignment]
    run.acknowledge("policy", 0, Position(0), 0, True)
    assert run.status().batches_freed == 1
    first.die()
    second = join(server.url, "second")
    assert second.runs.get("run").status().batches_freed == 1
    wait_until(lambda: not [key for key in keys(server, "run") if ":batch:" in key or ":staged:" in key], "it goes")


def test_a_table_is_that_of_the_last_publication_though_another_owner_made_it(server: RedisServer, join: Join) -> None:
    first, second = join(server.url, "first"), join(server.url, "second")
    first.runs.create("run", {**CREATED, "n_samples_per_prompt": 2, "micro_batch": {"size": 1}})
    run = first.runs.get("run")
    run.submit(table(*group_rows("a")))
    wait_until(lambda: published(first, "run", 0), "it is made")
    before = run.numbers(0)

    def move(to: Replica) -> None:
        def is_taken() -> bool:
            server.client().delete(to.run_store._keys("run").owner)
            with suppress(UnavailableError):
                return not to.runs.get("run").is_lost
            return False

        wait_until(lambda: all(one.is_lost for one in to.runs.own()), "it knows that it is not the owner")
        wait_until(is_taken, "it is taken over")

    move(second)
    second.runs.get("run").resume("policy", Checkpoint(Position(0)), "launch", 2)
    wait_until(lambda: published(second, "run", 0), "it is made for two ranks")
    after = second.runs.get("run").numbers(0)
    assert after != before
    move(first)
    assert first.runs.get("run").numbers(0) == after


def test_what_could_not_be_removed_while_redis_was_down_is_removed_later(
    server: RedisServer, proxy: Proxy, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = join(proxy.url)
    one.runs.create("run", CREATED)
    run = one.runs.get("run")
    run.submit(table(*group_rows("a")))
    wait_until(lambda: published(one, "run", 0), "it is made")
    free, fails = RedisRunLog.free, [True]

    def failing(log: RedisRunLog, batch: str) -> None:
        if not fails:
            return free(log, batch)
        fails.clear()
        proxy.refuse()
        proxy.cut()
        try:
            return free(log, batch)
        finally:
            proxy.accept()

    monkeypatch.setattr(RedisRunLog, "free", failing)
    run.acknowledge("policy", 0, Position(0), 0, True)
    wait_until(lambda: not [key for key in keys(server, "run") if ":batch:" in key or ":staged:" in key], "it goes")


def test_a_batch_whose_publication_is_in_doubt_is_there_when_the_run_is_opened_again(
    server: RedisServer, join: Join
) -> None:
    """The log may have it: what was published is not for the former book to remove."""
    one = join(server.url)
    one.runs.create("run", CREATED)
    run = one.runs.get("run")
    log = run._log
    assert isinstance(log, RedisRunLog)
    append = log.append

    def doubtful(record: bytes, tables: Mapping[int, Steps]) -> None:
        append(record, tables)
        if b"BatchPublished" in record:
            log.lose()
            raise LogLostError("it is unknown whether the last change was made")

    log.append = doubtful  # type: ignore[method-assign]
    free = one.store.free

    def late(name: str, batch: int) -> None:
        # The thread that published is slow; if the run can be opened meanwhile, it is.
        with suppress(TimeoutError):
            wait_until(lambda: one.runs._runs["run"] is not run, "it is opened again", 2)
        free(name, batch)

    one.store.free = late  # type: ignore[method-assign, assignment]
    run.submit(table(*group_rows("a")))
    wait_until(lambda: one.runs.own() and one.runs.own()[0] is not run, "it is opened again")
    again = one.runs.get("run")
    wait_until(lambda: again.batch(0).state is BatchState.PUBLISHED, "it is there")
    time.sleep(0.3)
    view = again.shard("policy", 0, None, 0)
    assert view.state is BatchState.PUBLISHED
    assert view.address is not None
    assert set(uids_of(b"".join(again.read_shard(0, view.address)))) == {"a"}


def test_owners_that_die_under_load_with_short_logs_lose_nothing(
    server: RedisServer, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log is compacted all the time."""
    monkeypatch.setattr("gristmill_service.storage.run_store._SHORT_TAIL", 3000)
    replicas = [join(server.url, "0")]
    replicas[0].runs.create("run", CREATED)
    accepted, seen, stop, errors = list[str](), dict[int, bytes](), threading.Event(), list[BaseException]()

    def produce(worker: int) -> None:
        number = 0
        while not stop.is_set():
            uid = f"{worker}-{number}"
            try:
                replicas[-1].runs.get("run").submit(table(*group_rows(uid)))
            except (UnavailableError, ResourceExhaustedError):
                time.sleep(0.01)
                continue
            except BaseException as error:  # noqa: BLE001
                errors.append(error)
                return
            accepted.append(uid)
            number += 1

    def train() -> bool:
        with suppress(UnavailableError):
            run = replicas[-1].runs.get("run")
            view = run.shard("policy", 0, None, 0)
            if view.state is BatchState.PUBLISHED:
                assert view.position is not None
                assert view.address is not None
                data = b"".join(run.read_shard(view.position.batch, view.address))
                assert seen.setdefault(view.position.batch, data) == data
                run.acknowledge("policy", 0, view.position, 0, True)
            return bool(view.state is BatchState.END)
        return False

    def finish() -> bool:
        with suppress(UnavailableError):
            return bool(replicas[-1].runs.get("run").finish() >= 0)
        return False

    threads = [threading.Thread(target=produce, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    try:
        for number in range(1, 5):
            until = len(seen) + 15
            while len(seen) < until and not errors:
                train()
            replicas.append(join(server.url, str(number)))
            replicas[-2].die()
    finally:
        stop.set()
        for thread in threads:
            thread.join(20)
    assert not errors, errors
    wait_until(finish, "it finishes")
    wait_until(train, "all is trained")
    uids = [uid for data in seen.values() for uid in set(uids_of(data))]
    assert len(uids) == len(set(uids))
    assert set(uids) == set(accepted)
    assert server.client().hexists(replicas[-1].run_store._keys("run").head, "snapshot")
    status = replicas[-1].runs.get("run").status()
    assert (status.row_bytes, status.shard_bytes, status.groups_dropped) == (0, 0, {})


def test_many_runs_keep_their_owner_though_redis_is_slow(server: RedisServer, proxy: Proxy, join: Join) -> None:
    one = join(proxy.url, "one", 4.0)
    names = [f"run-{number}" for number in range(30)]
    for name in names:
        one.runs.create(name, CREATED)
    claimed = {name: one.runs.get(name) for name in names}
    # One after another, their renewals would take longer than a lease, and a server that restarted knows no script.
    server.client().script_flush()
    proxy.delay(0.1)
    try:
        time.sleep(6.0)
        assert [name for name in names if claimed[name].is_lost] == []
    finally:
        proxy.delay(0)


def test_a_node_of_a_cluster_that_hangs_takes_only_its_own_runs_with_it(tmp_path: Path, join: Join) -> None:
    with RedisCluster(tmp_path / "cluster", arguments=["cluster-require-full-coverage no"]) as cluster:
        # The nodes are to find each other out only after the test.
        for node in cluster.nodes:
            node.client().config_set("cluster-node-timeout", 60_000)
        one = join(cluster.url, "one", 4.0)
        names = [f"run-{number}" for number in range(12)]
        for name in names:
            one.runs.create(name, CREATED)
        claimed = {name: one.runs.get(name) for name in names}
        hangs = cluster.nodes[2]
        kept = [name for name in names if cluster.node_of(one.run_store._keys(name).log.encode()) is not hangs]
        assert 0 < len(kept) < len(names)
        hangs.pause()
        try:
            time.sleep(6.0)
            assert [name for name in kept if claimed[name].is_lost] == []
        finally:
            hangs.resume()


def test_where_one_node_of_a_cluster_loses_its_last_writes_its_runs_alone_are_rolled_back(
    tmp_path: Path, join: Join
) -> None:
    arguments = ["cluster-require-full-coverage no"]
    with RedisCluster(tmp_path / "cluster", arguments=arguments, appendonly="always") as cluster:
        one = join(cluster.url, "one")
        names = [f"run-{number}" for number in range(12)]
        for name in names:
            one.runs.create(name, CREATED)
            one.runs.get(name).submit(table(*group_rows("a")))
        wait_until(lambda: all(published(one, name, 0) for name in names), "they are made")
        node = cluster.nodes[2]
        hurt = {name for name in names if cluster.node_of(one.run_store._keys(name).log.encode()) is node}
        assert 0 < len(hurt) < len(names)
        saved = tmp_path / "saved"
        shutil.copytree(node.directory, saved)
        for name in names:
            one.runs.get(name).submit(table(*group_rows("b")))
        wait_until(lambda: all(published(one, name, 1) for name in names), "they are made")
        node.kill()
        # As a replica that had not received the last writes when it took over.
        shutil.rmtree(node.directory)
        shutil.copytree(saved, node.directory)
        node.start()

        def submit(name: str) -> bool:
            with suppress(UnavailableError, LogLostError):
                one.runs.get(name).submit(table(*group_rows("c")))
                return True
            return False

        for name in names:
            wait_until(partial(submit, name), f"{name} accepts rows")
        status = {name: one.runs.get(name).status() for name in names}
        assert {name for name in names if status[name].generation == 2} == hurt
        assert all(status[name].generation == 1 for name in names if name not in hurt)
        wait_until(
            lambda: all(published(one, name, 1 if name in hurt else 2) for name in names), "the next batches are made"
        )


def test_a_run_recovered_again_and_again_leaves_no_thread_and_no_connection(server: RedisServer, join: Join) -> None:
    one = join(server.url)
    one.runs.create("run", CREATED)
    one.runs.get("run").submit(table(*group_rows("a")))
    wait_until(lambda: published(one, "run", 0), "it is made")

    def reopen() -> None:
        run = one.runs.get("run")
        run._writer.lose()
        wait_until(lambda: one.runs.get("run") is not run, "it is recovered")

    def used() -> tuple[int, int]:
        # The service's workers are few, and stay.
        # Those of pools are started when they are first needed, which may be meanwhile.
        pools = (
            "gristmill-worker",
            "gristmill-build",
            "gristmill-helper",
            "gristmill-leases",
            "gristmill-log",
            "asyncio",
        )
        # Services of other tests may serve in this process; this one serves no API.
        apis = ("grpc", "http", "AnyIO")
        threads = [one for one in threading.enumerate() if not one.name.startswith((*pools, *apis))]
        return len(threads), int(server.client().info("clients")["connected_clients"])

    reopen()
    before = used()
    for _ in range(100):
        reopen()
    wait_until(lambda: used()[0] <= before[0], "its threads have ended")
    assert used()[1] <= before[1] + 32, "a connection a worker and a building thread at most"
    assert published(one, "run", 0)


def test_a_run_deleted_while_its_lease_runs_out_is_deleted(server: RedisServer, join: Join) -> None:
    one, two = join(server.url, "one"), join(server.url, "two")
    for turn in range(20):
        one.runs.create("run", CREATED)
        with suppress(OwnedElsewhereError):
            one.runs.get("run").submit(table(*group_rows("a")))

        def interfere() -> None:
            time.sleep(random.uniform(0, 0.01))
            server.client().delete(one.run_store._keys("run").owner)
            with suppress(GristmillError):
                two.runs.get("run")

        other = threading.Thread(target=interfere)
        other.start()
        owners = [one.runs, two.runs]
        for attempt in range(200):
            try:
                owners[attempt % 2].delete("run")
            except UnavailableError:
                time.sleep(0.02)
                continue
            except GristmillError as error:
                if error.code != "NOT_FOUND":
                    raise
            break
        other.join()
        wait_until(lambda: _gone(one.runs, two.runs), "it is gone for both")
        assert not [key for key in keys(server, "run") if "probe" not in key and key != "runs:runs"], turn


def _gone(*runs: Any) -> bool:
    for each in runs:
        try:
            each.delete("run")
        except GristmillError as error:
            if error.code != "NOT_FOUND":
                return False
    return True


def test_tables_of_groups_that_share_a_request_are_found_again_after_publication(
    server: RedisServer, join: Join
) -> None:
    """Published rows are left to Redis; those of the same request whose groups are open are found there, too."""
    one = join(server.url)
    one.runs.create("run", {**CREATED, "train_batch_size": 2, "policy_mini_batch_size": 2})
    run = one.runs.get("run")
    run.submit(table(*group_rows("a"), *group_rows("b"), *group_rows("c"), group_rows("d")[0]))
    wait_until(lambda: published(one, "run", 0), "it is made")
    assert len(next(run.export(0))) == 4
    run.submit(table(group_rows("d")[1]))
    wait_until(lambda: published(one, "run", 1), "it is made")
    for batch, uids in ((0, {"a", "b"}), (1, {"c", "d"})):
        view = run.shard("policy", 0, Position(batch), 0)
        assert view.address is not None
        assert set(uids_of(b"".join(run.read_shard(batch, view.address)))) == uids
        run.acknowledge("policy", 0, Position(batch), 0, True)
    assert run.status().row_bytes == 0
    wait_until(lambda: not [key for key in keys(server, "run") if ":rows:" in key], "rows go")
    assert run.config.train_batch_size == 2


def test_a_compaction_that_fails_is_not_tried_again_with_every_change(
    server: RedisServer, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each writes down the whole state, with the run's lock held."""
    monkeypatch.setattr("gristmill_service.storage.run_store._SHORT_TAIL", 3000)
    one = join(server.url)
    one.runs.create("run", CREATED)
    run, tried = one.runs.get("run"), list[int]()

    def full(end: LogEnd, snapshot: Iterable[bytes]) -> None:
        tried.append(end.number)
        raise UnavailableError("Redis is full")

    run._log.compact = full
    for number in range(200):
        run.submit(table(*group_rows(f"u{number}")))
    assert 1 <= len(tried) < 20
