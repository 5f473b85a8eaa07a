"""`seal_by: call`: batches stay what a call made them, whatever becomes of the process that owns the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.services import CONFIG, Service, Services, group, on_redis, owner, patiently, uids_of
from tests.redis.servers import RedisServer

BY_CALL = CONFIG | {"seal_by": "call"}

Successor = Callable[[], Service]
"""The process that owns the run once its first owner is killed."""


@pytest.fixture(params=["journal", "redis"])
def owners(
    request: pytest.FixtureRequest, services: Services, shared_redis: RedisServer, tmp_path: Path, run: str
) -> tuple[Service, Successor]:
    if request.param == "journal":
        (tmp_path / "shards").mkdir()
        flags = ["--journal-dir", str(tmp_path / "journal"), "--shared-memory-dir", str(tmp_path / "shards")]
        [first] = services.start(1, *flags)
        first.grpc.create(run, BY_CALL)
        return first, lambda: services.start(1, *flags)[0]
    both = services.start(2, *on_redis(shared_redis.url, prefix=run))
    both[0].grpc.create(run, BY_CALL)
    first = owner(both, run)
    return first, lambda: next(one for one in both if one is not first)


def test_the_batches_of_an_owner_that_is_killed_stay_as_they_were_sealed(
    owners: tuple[Service, Successor], run: str
) -> None:
    first, successor = owners
    first.grpc.submit(run, [each for uid in "abcde" for each in group(uid)])
    assert first.grpc.get(run)["batches_sealed"] == 0
    assert first.grpc.seal(run, 0) == {"batch": 0, "prompts": 5}
    first.grpc.submit(run, [each for uid in "fgh" for each in group(uid)])
    first.kill()
    second = successor()
    assert patiently(lambda: second.http.seal(run, 0)) == {"batch": 0, "prompts": 5}, "asked again after no answer"
    status = second.grpc.get(run)
    assert (status["batches_sealed"], status["groups_complete"]) == (1, 3), "nothing else is sealed"
    assert second.http.seal(run, 1) == {"batch": 1, "prompts": 3}
    # A mini-batch has two groups.
    assert second.grpc.batch(run, 0, wait_s=20)["state"] == "published"
    uids = [sorted(set(uids_of(second.grpc.read(run, 0, mini_batch, 0)))) for mini_batch in range(3)]
    assert uids == [["a", "b"], ["c", "d"], ["e"]]
