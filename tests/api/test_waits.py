"""Waiting calls through either API: woken by what they wait for, and in nobody's way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import httpx
import pytest

from gristmill.v1 import trainer_pb2
from gristmill_service.settings import Settings
from tests.api.apis import CONFIG, STATES, Api, GrpcApi, HttpApi, Refused, group
from tests.on_loop import Service
from tests.serving import FREE_PORTS

T = TypeVar("T")
WAIT_S = 60.0


@contextmanager
def waiting(service: Service, call: Callable[[], T]) -> Iterator[Future[T]]:
    """The body runs when the call waits."""
    before = none_waits(service)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(call)
        until(lambda: service.long_poll.count > before or answer.done())
        yield answer
        answer.result(WAIT_S)


def none_waits(service: Service) -> int:
    """How many wait, which is 0: once those of the test before are gone."""
    until(lambda: service.long_poll.count == 0)
    return 0


def until(is_so: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(12_000):
        if is_so():
            return
        pause.wait(0.005)
    pytest.fail("it did not come to be in a minute")


def test_a_batch_wakes_who_waits_for_it(service: Service, api: Api, run: str) -> None:
    with waiting(service, lambda: api.batch(run, 0, wait_s=WAIT_S)) as answer:
        for uid in ("a", "b"):
            api.submit(run, group(uid))
    assert answer.result()["state"] == "published"


def test_a_shard_wakes_who_waits_for_it(service: Service, api: Api, run: str) -> None:
    with waiting(service, lambda: api.shard(run, 0, wait_s=WAIT_S)) as answer:
        for uid in ("a", "b"):
            api.submit(run, group(uid))
    assert answer.result()["state"] == "published"


def test_a_policy_version_wakes_who_waits_for_it(service: Service, api: Api, run: str) -> None:
    with waiting(service, lambda: api.policy_version(run, at_least=2, wait_s=WAIT_S)) as answer:
        api.announce(run, 2)
    assert answer.result() == 2


def test_room_wakes_who_waits_for_it(service: Service, api: Api, run_name: str) -> None:
    api.create(run_name, {**CONFIG, "max_buffered_batches": 1})
    uids = [f"uid-{number}" for number in range(6)]
    admitted = api.begin(run_name, uids).count("admitted")
    with waiting(service, lambda: api.begin(run_name, ["late"], wait_s=WAIT_S)) as answer:
        api.abort_groups(run_name, uids[:admitted], "made room")
    assert answer.result() == ["admitted"]


def test_finishing_ends_the_wait_for_a_batch_that_never_comes(service: Service, api: Api, run: str) -> None:
    with waiting(service, lambda: api.batch(run, 0, wait_s=WAIT_S)) as answer:
        api.finish(run)
    assert answer.result()["state"] == "end"


def test_deleting_a_run_ends_the_wait(service: Service, api: Api, run: str) -> None:
    with pytest.raises(Refused) as refused, waiting(service, lambda: api.batch(run, 0, wait_s=WAIT_S)):
        api.delete(run)
    assert refused.value.code == "NOT_FOUND"


def test_a_wait_that_is_over_is_answered_as_it_stands(api: Api, run: str) -> None:
    assert api.batch(run, 0, wait_s=0.02)["state"] == "pending"
    assert api.policy_version(run, at_least=9, wait_s=0.02) == 0


def test_a_caller_that_hangs_up_frees_its_place(
    service: Service, grpc_api: GrpcApi, http_api: HttpApi, run_name: str
) -> None:
    grpc_api.create(run_name, CONFIG)
    before = none_waits(service)
    request = trainer_pb2.GetBatchRequest(run=run_name, batch=0, wait_s=30)
    call = grpc_api.trainers.GetBatch.future(request)
    until(lambda: service.long_poll.count > before)
    call.cancel()
    until(lambda: service.long_poll.count == before)
    with pytest.raises(httpx.ReadTimeout):
        http_api.client.get(
            f"/v1/runs/{run_name}/batches/0", params={"wait_s": 30}, timeout=httpx.Timeout(30, read=0.2)
        )
    until(lambda: service.long_poll.count == before)


def test_hundreds_who_wait_are_in_no_producer_s_way(service: Service, run_name: str) -> None:
    api = GrpcApi(service.grpc_address)
    api.create(run_name, CONFIG)
    before = none_waits(service)
    request = trainer_pb2.GetBatchRequest(run=run_name, batch=0, wait_s=WAIT_S)
    calls = [api.trainers.GetBatch.future(request) for _ in range(300)]
    until(lambda: service.long_poll.count == before + 300)
    for number in range(50):
        # Groups that never complete a batch: each change wakes everyone.
        api.submit(run_name, group("a", samples=1))
        api.announce(run_name, number)
    for uid in ("a", "b"):
        api.submit(run_name, group(uid))
    assert {STATES[call.result().state] for call in calls} == {"published"}
    api.close()


def test_those_too_many_are_answered_at_once() -> None:
    service = Service(Settings(**FREE_PORTS, store="memory", max_waiters=1, shutdown_grace_s=5))
    service.start()
    api = GrpcApi(service.grpc_address)
    api.create("run", CONFIG)
    with waiting(service, lambda: api.batch("run", 0, wait_s=WAIT_S)) as answer:
        assert api.batch("run", 0, wait_s=WAIT_S)["state"] == "pending"
        for uid in ("a", "b"):
            api.submit("run", group(uid))
    assert answer.result()["state"] == "published"
    api.close()
    service.stop()


def test_stopping_the_service_answers_who_waits() -> None:
    service = Service(Settings(**FREE_PORTS, store="memory", shutdown_grace_s=5))
    service.start()
    apis: list[Api] = [GrpcApi(service.grpc_address), HttpApi(service.http_url)]
    apis[0].create("run", CONFIG)
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(api.batch, "run", 0, WAIT_S) for api in apis]
        until(lambda: service.long_poll.count == 2)
        service.stop()
        # HTTP counts whole seconds.
        for answer, retry_after_s in zip(answers, (0.5, 1.0), strict=True):
            with pytest.raises(Refused) as refused:
                answer.result()
            assert (refused.value.code, refused.value.retry_after_s) == ("UNAVAILABLE", retry_after_s)
    for api in apis:
        api.close()
