"""A log in a Redis that loses answers, falls silent, fills up or forgets: the certain stays, losses are reported."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest
import redis
from structlog.testing import capture_logs

from gristmill.errors import AlreadyExistsError, NotFoundError, UnavailableError
from gristmill_service.storage.redis.run_log import RedisRunLog
from gristmill_service.storage.redis.run_store import RedisRunStore
from gristmill_service.storage.redis.scripts import Outcome
from gristmill_service.storage.redis.shard_store import RedisShardStore
from gristmill_service.storage.run_store import LogLostError, OwnedElsewhereError
from tests.redis.proxy import Proxy
from tests.redis.run_logs import PREFIX, SHORT_S, Join, any_table, expire, same, started, stored
from tests.redis.servers import RedisServer, StartRedis, wait_until
from tests.storage.tables import compact
from tests.storage.test_stores import sources

T = TypeVar("T")


class TestDoubt:
    """One server, behind a network that fails."""

    @pytest.fixture
    def proxy(self, redis_server: RedisServer) -> Iterator[Proxy]:
        with Proxy(redis_server.port) as running:
            yield running

    def test_an_append_whose_answer_is_lost_is_appended_once(
        self, redis_server: RedisServer, proxy: Proxy, join: Join
    ) -> None:
        store = join(proxy.url)
        log = store.create("run", b"{}")
        started(log)
        log.append(b"one", {})
        for record in (b"two", b"three"):
            proxy.lose_next_reply()
            log.append(record, {})
        log.append(b"four", {})
        expire(store)
        assert started(join(redis_server.url, 1).open("run")) == [b"one", b"two", b"three", b"four"]

    def test_an_append_that_never_arrived_had_no_effect_and_may_be_repeated(self, proxy: Proxy, join: Join) -> None:
        log = join(proxy.url).create("run", b"{}")
        started(log)
        proxy.refuse()
        proxy.cut()
        # The first finds its connection broken, so that nobody knows; from then on none is open to send it over.
        with pytest.raises(UnavailableError):
            log.append(b"lost", {})
        proxy.accept()

    def test_an_append_of_unknown_outcome_loses_the_book_which_is_opened_again(
        self, redis_server: RedisServer, proxy: Proxy, join: Join, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("gristmill_service.storage.redis.run_log._RETRY_S", 0.3)
        store = join(proxy.url)
        log = store.create("run", b"{}")
        started(log)
        log.append(b"one", {})
        proxy.lose_next_reply()
        proxy.refuse()
        with pytest.raises(LogLostError, match="it is unknown whether the last change was made"):
            log.append(b"two", {})
        assert log.is_lost
        proxy.accept()
        again = store.open("run")
        records = started(again)
        assert records in ([b"one"], [b"one", b"two"])
        again.append(b"three", {})
        expire(store)
        assert started(join(redis_server.url, 1).open("run")) == [*records, b"three"]

    @pytest.mark.parametrize("step", ["create", "claim", "compact", "publish", "release", "delete"])
    def test_every_step_may_be_repeated_when_its_answer_is_lost(
        self, redis_server: RedisServer, proxy: Proxy, join: Join, step: str
    ) -> None:
        store = join(proxy.url)
        shards = RedisShardStore(store._client, store, PREFIX)

        def doubtful(call: Callable[..., T], *arguments: Any) -> T:
            if step != call.__name__.strip("_"):
                return call(*arguments)
            proxy.lose_next_reply()
            with pytest.raises(UnavailableError):
                call(*arguments)
            return call(*arguments)

        def create() -> RedisRunLog:
            try:
                return store.create("run", b"{}")
            except AlreadyExistsError:
                return store.open("run")

        def claim() -> RedisRunLog:
            return store.open("run")

        def compact() -> None:
            log.compact(log.end, [b"a", b"ll"])

        def publish() -> None:
            shards.publish("run", 0, b"{}", sources(first=b"x"))

        def delete() -> None:
            store.delete("run")

        doubtful(create).close()
        log = doubtful(claim)
        started(log)
        log.append(b"one", {})
        doubtful(compact)
        doubtful(publish)
        assert shards.plan("run", 0) == b"{}"
        shards.delete_run("run")
        if step == "release":
            proxy.lose_next_reply()
            log.close()
            log = store.open("run")
        doubtful(delete)
        log.close()
        wait_until(lambda: not redis_server.client().exists(f"{{{PREFIX}:run}}:owner"), "nothing is left")
        assert {key for key in redis_server.client().keys("*") if b":snapshot:" not in key} <= {b"test:probe"}

    def test_a_silent_server_refuses_rows_and_is_reported_as_trouble_until_it_answers(
        self, redis_server: RedisServer, proxy: Proxy, join: Join
    ) -> None:
        store = join(proxy.url, lease_s=SHORT_S)
        log = store.create("run", b"{}")
        started(log)
        proxy.refuse()
        proxy.cut()
        with pytest.raises(UnavailableError):
            stored(log, any_table())
        wait_until(lambda: store.unhealthy_reason(), "it is reported")
        proxy.accept()
        wait_until(lambda: not store.unhealthy_reason(), "it is well again")

    def test_a_server_without_room_refuses_rows_and_takes_what_makes_room(
        self, redis_server: RedisServer, join: Join
    ) -> None:
        store = join(redis_server.url, lease_s=SHORT_S)
        admin = redis_server.client()
        log = store.create("run", b"{}")
        started(log)
        number = stored(log, any_table())
        try:
            admin.config_set("maxmemory-policy", "noeviction")
            admin.config_set("maxmemory", int(admin.info("memory")["used_memory"] / 0.95))
            wait_until(lambda: "maxmemory" in store.unhealthy_reason(), "it is reported")
            with pytest.raises(UnavailableError, match="maxmemory"):
                log.check()
            log.check(has_rows=False)
            log.append(b"acknowledged", {})
            log.remove([number])
            admin.config_set("maxmemory", 0)
            wait_until(lambda: not store.unhealthy_reason(), "it is well again")
            log.check()
        finally:
            admin.config_set("maxmemory", 0)


class TestForgetfulServer:
    def test_a_lost_tail_is_noticed_by_the_next_append_and_nothing_diverges(
        self, start_redis: StartRedis, join: Join
    ) -> None:
        server = start_redis(appendonly="always")
        log = join(server.url).create("run", b"{}")
        started(log)
        log.append(b"one", {})
        saved = server.directory.with_name("saved")
        shutil.copytree(server.directory, saved)
        log.append(b"two", {})
        log.append(b"three", {})
        server.kill()
        for old in saved.iterdir():  # as a disk that had not written the end
            target = server.directory / old.name
            shutil.rmtree(target) if target.is_dir() else target.unlink()
            shutil.copytree(old, target) if old.is_dir() else shutil.copy(old, target)
        server.start()
        with pytest.raises(UnavailableError):
            log.append(b"four", {})
        with pytest.raises(LogLostError, match=r"has lost a part|not known"):
            log.append(b"four", {})
        assert log.is_lost
        again = join(server.url, 1)
        expire(again)
        log = again.open("run")
        assert started(log) == [b"one"]
        log.append(b"another", {})
        log.close()
        assert started(again.open("run")) == [b"one", b"another"]

    def test_a_server_that_forgot_everything_has_no_run_any_more(self, start_redis: StartRedis, join: Join) -> None:
        server = start_redis(appendonly="no")
        store = join(server.url)
        log = store.create("run", b"{}")
        started(log)
        log.append(b"one", {})
        server.kill()
        server.start()
        for _ in range(2):
            with pytest.raises(UnavailableError):
                log.append(b"two", {})
        assert log.is_lost
        with pytest.raises(NotFoundError):
            store.open("run")
        assert store.names() == []

    def test_a_server_that_keeps_its_log_forgets_nothing_when_it_is_killed(
        self, start_redis: StartRedis, join: Join
    ) -> None:
        server = start_redis(appendonly="always")
        store = join(server.url)
        log = store.create("run", b"{}")
        started(log)
        number = stored(log, any_table())
        server.kill()
        server.start()
        log.append(b"two", {})
        assert same(log.get(number), any_table())
        log.close()
        assert started(store.open("run")) == [b"rows", b"two"]


class TestRollback:
    """A server that forgot what it had confirmed, as the new master may after a failover."""

    @pytest.fixture
    def store(self, redis_server: RedisServer, join: Join) -> RedisRunStore:
        return join(redis_server.url, lease_s=SHORT_S)

    @pytest.fixture
    def log(self, store: RedisRunStore) -> RedisRunLog:
        log = store.create("run", b"{}")
        started(log)
        for record in (b"one", b"two", b"three"):
            log.append(record, {})
        return log

    def forget(self, server: RedisServer, count: int) -> None:
        """The last records of the log."""
        key = f"{{{PREFIX}:run}}:log"
        entries: Any = server.client().xrevrange(key, count=count + 1)
        server.client().xdel(key, *(name for name, _ in entries[:count]))
        server.client().execute_command("XSETID", key, entries[count][0])
        server.client().hset(f"{{{PREFIX}:run}}:head", "last", entries[count][0])
        server.client().hdel(f"{{{PREFIX}:run}}:head", "generation")

    def taken_over(
        self, server: RedisServer, store: RedisRunStore, join: Join, **options: float
    ) -> tuple[RedisRunStore, RedisRunLog]:
        """The store and the log of another, which took the run over after it was forgotten in part."""
        self.forget(server, 2)
        expire(store)
        # Renewals, which take reports along, come every third of a lease.
        other = join(server.url, **({"lease_s": 6.0} | options))
        return other, other.open("run")

    def test_a_caller_that_was_sent_more_learns_it_when_the_log_is_opened_again(
        self, redis_server: RedisServer, store: RedisRunStore, log: RedisRunLog
    ) -> None:
        self.forget(redis_server, 2)
        with pytest.raises(LogLostError, match="has lost a part"):
            log.append(b"four", {})
        log.close()
        with capture_logs() as said:
            again = store.open("run")
            replay = again.replay()
        assert list(replay.records) == [b"one"]
        assert replay.is_short()
        [entry] = [entry for entry in said if entry["event"] == "log rolled back"]
        assert (entry["log_level"], entry["records_lost"], entry["records_left"]) == ("error", 2, 1)

    def test_the_generation_that_was_reported_is_known_though_the_log_lost_its_beginning(
        self, redis_server: RedisServer, store: RedisRunStore, log: RedisRunLog, join: Join
    ) -> None:
        log.note_generation(5)
        log.append(b"sent", {})
        self.forget(redis_server, 2)
        log.close()
        again = store.open("run")
        replay = again.replay()
        assert (replay.is_short(), replay.generation) == (True, 5)
        again.close()
        other = join(redis_server.url, lease_s=6.0)
        owned = other.open("run")
        assert owned.replay().generation == 0, "it was never reported"
        with pytest.raises(OwnedElsewhereError):
            store.open("run")
        owned.append(b"one", {})
        owned.append(b"other", {})
        wait_until(lambda: owned.is_lost, "it learns")
        owned.close()
        assert other.open("run").replay().generation == 5

    def test_it_is_reported_until_the_log_goes_on(
        self, redis_server: RedisServer, store: RedisRunStore, log: RedisRunLog
    ) -> None:
        self.forget(redis_server, 1)
        for _ in range(2):
            log.close()
            log = store.open("run")
            assert log.replay().is_short()
        log.append(b"goes on", {})
        log.close()
        assert not store.open("run").replay().is_short()

    @pytest.mark.parametrize("step", ["_read_head", "_read_records"])
    def test_it_is_reported_also_where_the_log_could_not_be_read_at_first(
        self, redis_server: RedisServer, store: RedisRunStore, log: RedisRunLog, step: str
    ) -> None:
        self.forget(redis_server, 1)
        log.close()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(RedisRunLog, step, failing)
            log = store.open("run")
            with pytest.raises(UnavailableError):
                log.replay()
        log.close()
        assert store.open("run").replay().is_short()

    def test_an_owner_that_took_over_after_a_failover_learns_it_from_the_one_before(
        self, redis_server: RedisServer, store: RedisRunStore, log: RedisRunLog, join: Join
    ) -> None:
        other, taken = self.taken_over(redis_server, store, join)
        assert not started_short(taken), "it cannot know"
        taken.append(b"goes on", {})
        log.close()
        with pytest.raises(OwnedElsewhereError):
            store.open("run")
        wait_until(lambda: taken.is_lost, "it is reported")
        taken.close()
        assert other.open("run").replay().is_short()

    def test_it_learns_it_also_where_redis_loses_the_first_report(
        self, redis_server: RedisServer, store: RedisRunStore, log: RedisRunLog, join: Join
    ) -> None:
        _, taken = self.taken_over(redis_server, store, join, lease_s=60.0)
        started(taken)
        log.close()
        with pytest.raises(OwnedElsewhereError):
            store.open("run")
        assert store._client.hdel(store._keys("run").head, "reported"), "it is reported"
        wait_until(lambda: reported_again(store), "it is reported again")
        compare(store, taken)
        assert taken.is_lost

    def test_a_report_that_is_repeated_is_logged_once(
        self, redis_server: RedisServer, store: RedisRunStore, log: RedisRunLog, join: Join
    ) -> None:
        other, taken = self.taken_over(redis_server, store, join, lease_s=60.0)
        started(taken)
        log.close()
        wait_until(lambda: reported_again(store), "it is reported")
        compare(store, taken)
        taken.close()
        again = other.open("run")
        assert again.replay().is_short()
        again.append(b"goes on", {})
        wait_until(lambda: reported_again(store), "it is reported again")
        compare(store, again)
        assert not again.is_lost

    def test_an_append_that_is_under_way_meanwhile_does_not_hide_it(
        self, redis_server: RedisServer, store: RedisRunStore, log: RedisRunLog, join: Join
    ) -> None:
        other, taken = self.taken_over(redis_server, store, join)
        started(taken)
        log.close()
        append = taken._scripts.confirmed

        def reported_meanwhile(*arguments: Any, more: Sequence[str]) -> Outcome:
            outcome = append(*arguments, more=more)
            with pytest.raises(OwnedElsewhereError):
                store.open("run")
            wait_until(lambda: taken.is_lost, "it is reported")
            return outcome

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(taken._scripts, "confirmed", reported_meanwhile)
            taken.append(b"goes on", {})
        taken.close()
        assert other.open("run").replay().is_short()

    def test_an_owner_that_took_over_what_is_whole_goes_on(
        self, redis_server: RedisServer, store: RedisRunStore, log: RedisRunLog, join: Join
    ) -> None:
        expire(store)
        taken = join(redis_server.url, lease_s=6.0).open("run")
        started(taken)
        taken.append(b"goes on", {})
        log.close()
        with pytest.raises(OwnedElsewhereError):
            store.open("run")
        wait_until(lambda: not store._client.hexists(store._keys("run").head, "reported"), "it is read")
        assert not taken.is_lost

    def test_an_idle_owner_learns_it_when_it_renews_its_lease(
        self, redis_server: RedisServer, log: RedisRunLog
    ) -> None:
        self.forget(redis_server, 1)
        wait_until(lambda: log.is_lost, "it learns")
        wait_until(lambda: log.lease == 0, "and stays lost", 1)

    def test_a_log_that_another_process_has_written_on_since_is_found_out(
        self, redis_server: RedisServer, join: Join, store: RedisRunStore, log: RedisRunLog
    ) -> None:
        self.forget(redis_server, 2)
        log.close()
        other = join(redis_server.url, 1).open("run")
        assert started(other) == [b"one"]
        for record in (b"another two", b"another three", b"another four"):
            other.append(record, {})
        other.close()
        replay = store.open("run").replay()
        assert list(replay.records)[-1] == b"another four"
        assert replay.is_short()

    def test_a_log_that_another_process_has_gone_on_with_is_whole(
        self, redis_server: RedisServer, join: Join, store: RedisRunStore, log: RedisRunLog
    ) -> None:
        log.close()
        other = join(redis_server.url, 1).open("run")
        started(other)
        other.append(b"four", {})
        compact(other, b"all")
        other.append(b"five", {})
        other.close()
        assert not store.open("run").replay().is_short()

    def test_a_run_of_the_same_name_is_not_taken_for_one_that_was_rolled_back(
        self, store: RedisRunStore, log: RedisRunLog
    ) -> None:
        store.delete("run")
        log.close()
        again = store.create("run", b"{}")
        assert not again.replay().is_short()


def test_errors_of_redis_never_leave_as_such(redis_server: RedisServer, join: Join) -> None:
    store = join(redis_server.url)
    log = store.create("run", b"{}")
    started(log)
    redis_server.client().delete(store._keys("run").log)
    with pytest.raises(LogLostError):
        log.append(b"one", {})
    assert not issubclass(LogLostError, redis.RedisError)


def started_short(log: RedisRunLog) -> bool:
    """Whether a log is found short when it is opened."""
    replay = log.replay()
    list(replay.records)
    return replay.is_short()


def reported_again(store: RedisRunStore) -> bool:
    """Whether a former owner that asks for the run reports."""
    with pytest.raises(OwnedElsewhereError):
        store.open("run")
    return bool(store._client.hexists(store._keys("run").head, "reported"))


def compare(store: RedisRunStore, log: RedisRunLog) -> None:
    """As the renewal of the lease does."""
    report = store._client.hget(store._keys("run").head, "reported")
    assert isinstance(report, bytes)
    store._client.hdel(store._keys("run").head, "reported")
    log.compare(report)


def failing(_: RedisRunLog) -> Any:
    raise UnavailableError("Redis does not answer")
