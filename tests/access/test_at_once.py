"""40 calls at once pass no limit: of a token, a run or the service, in one process and over two replicas."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
import yaml

from gristmill_service.access.tokens import TokenEntry, create_token
from gristmill_service.config import MOST_TAGS, RunConfig
from gristmill_service.run.machine.decisions.admission import with_overdraft
from gristmill_service.settings import Settings
from tests.access.conftest import Serve
from tests.api.apis import CONFIG, Json, row
from tests.on_loop import Service
from tests.redis.servers import RedisServer
from tests.run.harness import wait_until
from tests.serving import FREE_PORTS

CALLS = 40
ROW_BYTES = 768 + 4 * 5 + 2
TOKENS = 16384
RUN: Json = {**CONFIG, "dp_size": 1, "step_wise": False, "merge": "none", "max_buffered_batches": 100}


class Call(NamedTuple):
    path: str
    body: Json | None = None


def answered(service: Service, call: Call, headers: dict[str, str]) -> tuple[int, Json]:
    connection = HTTPConnection(urlsplit(service.http_url).netloc, timeout=60)
    body = None if call.body is None else json.dumps(call.body)
    kind = {"content-type": "application/json"}
    connection.request("GET" if body is None else "POST", f"/v1/runs{call.path}", body, headers | kind)
    answer = connection.getresponse()
    status, document = answer.status, json.loads(answer.read() or b"{}")
    connection.close()
    return status, document


@contextmanager
def at_once(services: Sequence[Service], calls: Sequence[Call], headers: dict[str, str]) -> Iterator[list[int]]:
    """Sends the calls at once, to the services in turn. Yields the statuses of the answers so far; waits for the others
    at the end."""
    barrier, statuses = threading.Barrier(len(calls)), list[int]()

    def send(number: int) -> None:
        barrier.wait()
        statuses.append(answered(services[number % len(services)], calls[number], headers)[0])

    threads = [threading.Thread(target=send, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    yield statuses
    for thread in threads:
        thread.join(60)


def sent(services: Sequence[Service], calls: Sequence[Call], headers: dict[str, str]) -> list[int]:
    with at_once(services, calls, headers) as statuses:
        pass
    return statuses


def token(path: Path, **quota: object) -> dict[str, str]:
    """The header of a caller with this quota."""
    header = {"authorization": f"Bearer {create_token(path, 'team', ['worker', 'trainer'], ['*'], None)}"}
    document = yaml.safe_load(path.read_text())
    document["tokens"][-1] |= quota
    path.write_text(yaml.safe_dump(document))
    return header


def creations(count: int = CALLS) -> list[Call]:
    return [Call("", {"run": f"made-{number}", "config": RUN}) for number in range(count)]


def groups(runs: int = 2) -> list[Call]:
    return [Call(f"/run-{number % runs}/groups", {"uids": [f"u{number}"]}) for number in range(CALLS)]


def tags() -> list[Call]:
    tagged = [[row(name := f"{number}-{index}", 0, tag=name) for index in range(2)] for number in range(CALLS)]
    return [Call("/run-0/rows", {"rows": pair}) for pair in tagged]


def rows(runs: int = 2, **fields: Any) -> list[Call]:
    return [
        Call(f"/run-{number % runs}/rows", {"rows": [row(f"u{number}", sample, **fields) for sample in range(2)]})
        for number in range(CALLS)
    ]


def samples() -> list[Call]:
    return [Call("/run-0/rows", {"rows": [row("u", sample)]}) for sample in range(CALLS)]


def waits() -> list[Call]:
    return [Call("/run-0/policy-version?at_least=1&wait_s=30")] * CALLS


def total(service: Service, kind: str) -> int:
    return sum(int(getattr(usage, kind)) for usage in service.runs.usage().values())


def largest(service: Service, kind: str) -> int:
    return max(int(getattr(usage, kind)) for usage in service.runs.usage().values())


class Limit(NamedTuple):
    """A limit, and what 40 calls at once reach. where: the model of its setting. reached: with `most`, exactly."""

    where: type
    name: str
    most: int
    calls: Callable[[], list[Call]]
    reached: Callable[[Service], int]
    most_reached: int | None = None
    runs: int = 2


LIMITS = [
    Limit(TokenEntry, "max_runs", 3, creations, lambda service: len(service.runs.own()), runs=0),
    Limit(TokenEntry, "max_groups", 5, groups, lambda service: total(service, "groups")),
    Limit(TokenEntry, "max_rows", 8, rows, lambda service: total(service, "rows")),
    Limit(TokenEntry, "max_row_bytes", 8 * ROW_BYTES, rows, lambda service: total(service, "row_bytes")),
    Limit(Settings, "max_runs", 3, creations, lambda service: len(service.runs.own()), runs=0),
    Limit(Settings, "max_run_groups", 5, groups, lambda service: largest(service, "groups")),
    Limit(Settings, "max_run_rows", 8, rows, lambda service: largest(service, "rows")),
    Limit(Settings, "max_run_row_bytes", 8 * ROW_BYTES, rows, lambda service: largest(service, "row_bytes")),
    Limit(
        Settings,
        "max_row_bytes",
        1 << 19,
        lambda: rows(runs=4, response_ids=[1] * TOKENS, loss_mask=[1] * TOKENS),
        lambda service: int(service.runs.row_room[0] <= with_overdraft(1 << 19)),
        1,
        runs=4,
    ),
    Limit(RunConfig, "max_buffered_batches", 3, lambda: groups(1), lambda service: total(service, "groups"), 6),
    Limit(
        RunConfig,
        "max_buffered_bytes",
        1 << 19,
        lambda: rows(runs=1, response_ids=[1] * TOKENS, loss_mask=[1] * TOKENS),
        lambda service: int(total(service, "row_bytes") <= with_overdraft(1 << 19)),
        1,
    ),
    Limit(RunConfig, "max_batches_ahead", 2, lambda: groups(1), lambda service: total(service, "groups"), 6),
    Limit(RunConfig, "max_staleness", 2, lambda: groups(1), lambda service: total(service, "groups"), 6),
    Limit(RunConfig, "max_samples_per_prompt", 4, samples, lambda service: total(service, "rows"), 2),
]
OF_ONE_CALL = {(Settings, "max_message_bytes"), (RunConfig, "max_seq_len")}
"""Each call is alone with them."""
WAITS = {(TokenEntry, "max_requests"), (Settings, "max_run_requests"), (Settings, "max_waiters")}
STREAMS = {(Settings, "max_streams")}
"""`test_admission.py` sends 40 at once."""


def test_every_limit_is_here() -> None:
    known = {(limit.where, limit.name) for limit in LIMITS} | OF_ONE_CALL | WAITS | STREAMS
    models = (Settings, TokenEntry, RunConfig)
    assert known == {(model, name) for model in models for name in model.model_fields if name.startswith("max_")}


@pytest.mark.parametrize("limit", LIMITS, ids=[f"{limit.where.__name__}.{limit.name}" for limit in LIMITS])
def test_40_calls_at_once_reach_a_limit_and_do_not_pass_it(serve: Serve, tmp_path: Path, limit: Limit) -> None:
    setting: Json = {limit.name: limit.most}
    settings, headers = setting if limit.where is Settings else {}, dict[str, str]()
    if limit.where is TokenEntry:
        path = tmp_path / "tokens.yaml"
        headers, settings = token(path, **setting), {"tokens_file": path}
    service = serve(**settings)
    for number in range(limit.runs):
        service.runs.create(f"run-{number}", {**RUN, **(setting if limit.where is RunConfig else {})})
    sent([service], limit.calls(), headers)
    assert limit.reached(service) == (limit.most if limit.most_reached is None else limit.most_reached)


def test_40_calls_at_once_that_name_new_tags_pass_no_limit(serve: Serve) -> None:
    service = serve()
    service.runs.create("run-0", RUN)
    sent([service], tags(), {})
    assert total(service, "groups") == MOST_TAGS


@pytest.mark.parametrize("name", sorted(name for _, name in WAITS))
def test_40_waits_at_once_pass_no_limit_of_calls(serve: Serve, tmp_path: Path, name: str) -> None:
    most, settings, headers = 3, dict[str, Any](), dict[str, str]()
    if name == "max_requests":
        settings["tokens_file"] = path = tmp_path / "tokens.yaml"
        headers = token(path, max_requests=most)
    else:
        settings[name] = most
    service = serve(**settings)
    service.runs.create("run-0", RUN)
    with at_once([service], waits(), headers) as answers:
        wait_until(lambda: len(answers) == CALLS - most and service.long_poll.count == most)
        service.runs.get("run-0").announce(1)
    assert len(answers) == CALLS


def test_creations_that_failed_and_runs_that_are_deleted_give_their_places_back(serve: Serve) -> None:
    service = serve(max_runs=2)
    wrong = [Call("", {"run": f"wrong-{number}", "config": RUN | {"dp_size": -1}}) for number in range(CALLS)]
    assert set(sent([service], wrong, {})) == {422}
    for _ in range(2):
        assert sorted(sent([service], creations(4), {})) == [200, 200, 429, 429]
        for run in service.runs.own():
            service.runs.delete(run.name)


# --- Over two replicas


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis"), appendonly="no") as server:
        yield server


@pytest.mark.parametrize("whose", ["token", "service"])
def test_40_creations_at_once_over_two_replicas_pass_no_limit(redis: RedisServer, tmp_path: Path, whose: str) -> None:
    settings: Json = {"store": "redis", "redis_url": redis.url, "redis_prefix": whose, "shutdown_grace_s": 5}
    headers, path = dict[str, str](), tmp_path / "tokens.yaml"
    if whose == "token":
        headers, settings["tokens_file"] = token(path, max_runs=3), path
    else:
        settings["max_runs"] = 3
    with ExitStack() as running:
        replicas = [Service(Settings(**FREE_PORTS, **settings)) for _ in range(2)]
        for replica in replicas:
            running.callback(replica.stop)
            replica.start()
        for _ in range(2):
            answers = sent(replicas, creations(), headers)
            names = replicas[0].runs.names()
            assert (len(names), answers.count(200)) == (3, 3)
            assert sorted(run.name for one in replicas for run in one.runs.own()) == names
            assert set(answers) == {200, 429}
            for one in replicas:
                for run in one.runs.own():
                    one.runs.delete(run.name)
        assert replicas[1].runs.names() == []
