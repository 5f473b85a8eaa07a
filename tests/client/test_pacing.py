"""Workers and a trainer that the run paces, over real calls: the client's habits, and a trainer's own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gristmill import RolloutClient, TrainerClient
from tests.on_loop import Service

SETTINGS: dict[str, Any] = {
    "train_batch_size": 4,
    "n_samples_per_prompt": 1,
    "policy_mini_batch_size": 1,
    "micro_batch": {"size": 1},
    "step_wise": False,
    "max_buffered_batches": 40,
}
GROUPS = 24
Trainer = TrainerClient[Any]


@pytest.fixture
def begun(service: Service, run_name: str) -> Iterator[Callable[..., list[int]]]:
    """Starts a worker that begins and completes one group after the other. Returns the versions with which they
    began."""
    workers: list[tuple[threading.Thread, RolloutClient]] = []

    def start(**settings: Any) -> list[int]:
        client, versions = RolloutClient(service.grpc_address, run_name, timeout_s=20), list[int]()
        client.create_run(SETTINGS | settings)

        def work() -> None:
            for number in range(GROUPS):
                uid, admitted = f"u{number}", list[str]()
                while not admitted:
                    admitted = list(client.begin_groups([uid], wait_s=5))
                version = client.policy_version()
                versions.append(version)
                row = {
                    "uid": uid,
                    "sample": 0,
                    "prompt_token_ids": [1],
                    "response_ids": [2],
                    "loss_mask": [1],
                    "reward": 1.0,
                }
                client.submit([{**row, "policy_version": version}])
            client.finish()

        workers.append((threading.Thread(target=work, daemon=True), client))
        workers[-1][0].start()
        return versions

    yield start
    for thread, client in workers:
        client.close()
        thread.join(20)


def opened(service: Service, run: str, **options: Any) -> Trainer:
    return TrainerClient(service.grpc_address, run, ranks="all", timeout_s=20, **options)


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("every_step", [False, True])
def test_with_no_batch_ahead_no_group_begins_with_weights_of_before(
    service: Service, run_name: str, begun: Callable[..., list[int]], prefetch: int, every_step: bool
) -> None:
    """The client reads ahead, and acknowledges a batch before its weights are out."""
    versions, want, version = begun(max_staleness=0, dp_size=2), list[int](), 0
    with opened(service, run_name, prefetch=prefetch) as trainer:
        trainer.announce_policy_version(0, keep_later=True)
        for batch in trainer:
            want += [version] * 4
            for mini_batch in batch.mini_batches():
                mini_batch.ack()
                if every_step and mini_batch.position.mini_batch < 3:
                    version += 1
                    trainer.announce_policy_version(version)
            version += 1
            # While these weights are sent.
            assert len(versions) == len(want)
            trainer.announce_policy_version(version)
    assert versions == want


@pytest.mark.parametrize("every", [3, None])
@pytest.mark.parametrize("max_staleness", [0, 4])
def test_a_trainer_that_announces_rarely_or_never_trains_to_the_end(
    service: Service, run_name: str, begun: Callable[..., list[int]], every: int | None, max_staleness: int
) -> None:
    begun(max_staleness=max_staleness)
    with opened(service, run_name) as trainer:
        trained = 0
        for batch in trainer:
            batch.ack()
            trained += 1
            if every and trained % every == 0:
                trainer.announce_policy_version(trained)
    assert trained == GROUPS // 4


def test_a_trainer_that_resumes_at_version_50_is_no_further_behind(
    service: Service, run_name: str, begun: Callable[..., list[int]]
) -> None:
    versions = begun(max_staleness=1)
    with opened(service, run_name) as trainer:
        trainer.announce_policy_version(50, keep_later=True)
        for batch in trainer:
            assert len(versions) <= 4 * (batch.number + 2)
            batch.ack()
            trainer.announce_policy_version(51 + batch.number)
    assert len(versions) == GROUPS
