"""Two tenants of one service: no answer to one names anything of the other, whatever waits, fails or is used up."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import grpc
import httpx
import numpy as np
import pytest
import yaml
from google.protobuf import json_format
from google.protobuf.message_factory import GetMessageClass

from gristmill_service.access.roles import ROLES
from gristmill_service.access.tokens import create_token
from gristmill_service.cli.checks import check_replicas
from gristmill_service.settings import Settings
from gristmill_service.storage import memory
from gristmill_service.storage.memory_room import MemoryRoom
from tests.access.test_calls import METHODS
from tests.api.apis import CONFIG, HttpApi, Json, Refused, row, rows_message
from tests.on_loop import Service
from tests.run.harness import wait_until
from tests.serving import FREE_PORTS

WORDS = {"a": "alpaca", "b": "buffalo"}
TOKENS = {"a": 7_654_321, "b": 8_765_432}
CHANGES = {"CreateRun", "FinishRun", "DeleteRun", "AnnouncePolicyVersion", "BeginGroups", "SubmitRows", "SetRewards"}
CHANGES |= {"AbortTrajectories", "AbortGroups", "SealBatch", "WriteColumns", "Acknowledge", "Commit", "Resume"}
LAST = ["FinishRun", "DeleteRun"]
REFUSED = {"post /v1/runs/{run}/rows", "post /v1/runs/{run}/rewards", "post /v1/runs/{run}/ack", "SetRewards"}
REFUSED |= {"put /v1/runs/{run}/batches/{batch}/policy/{mini_batch}/{rank}", "WriteColumns", "post /v1/runs/{run}/seal"}
"""The state of the run allows them no more, or they need a file. All others are answered."""
FREE_BYTES = 200_000
RUN: Json = {**CONFIG, "dp_size": 1, "train_batch_size": 1, "merge": "none", "max_buffered_batches": 20}


@dataclass(frozen=True)
class Tenant:
    """A tenant with runs in several states, and its tokens: one of all roles, and a scraper's."""

    name: str
    boss: str
    scraper: str

    @property
    def word(self) -> str:
        """A part of every name that the tenant chose."""
        return WORDS[self.name]

    @property
    def secrets(self) -> list[bytes]:
        """What no other tenant may read: names, and a token of its prompts as text and as bytes."""
        return [self.word.encode(), str(TOKENS[self.name]).encode(), np.int32(TOKENS[self.name]).tobytes()]

    def run(self, state: str) -> str:
        return f"{self.name}-{self.word}-{state}"

    def rows(self, name: str, length: int = 1, samples: int = 2) -> list[Json]:
        word, prompt = self.word, [TOKENS[self.name]] * length
        fields: Json = {"tag": f"{word}-tag", "agent": f"{word}-agent", "reward_components": {f"{word}-part": 1.0}}
        fields |= {"step_key": f"{word}-key", "stop_reason": f"{word}-stop", "prompt_token_ids": prompt}
        return [row(f"{word}-{name}", sample, **fields) for sample in range(samples)]

    def values(self, run: str) -> Json:
        """A value for each field and parameter that calls have, by its name. Both APIs use the same names."""
        uid = f"{self.word}-open"
        trajectory = {"uid": uid, "sample": 0, "round": 0}
        return {
            "run": run,
            "config": RUN,
            "config_json": json.dumps(RUN),
            "uid": uid,
            "uids": [uid],
            "name": "app.js",
            "batch": 0,
            "mini_batch": 0,
            "row": 0,
            "sample": 0,
            "step": 0,
            "rank": 0,
            "round": 0,
            "start": 0,
            "trajectories": [trajectory],
            "rewards": [{**trajectory, "reward": 1.0}],
            "reason": f"{self.word}-why",
            "position": {"batch": 0},
            "ranks": [],
            "launch": f"{self.word}-job",
            "version": 1,
            "at_least": 1,
            "model": "policy",
            "wait_s": 0.0,
            "rows": self.rows("more"),
        }


@dataclass(frozen=True)
class Shared:
    """A service of two tenants. everyone: the token of a scraper of all runs."""

    service: Service
    tenants: dict[str, Tenant]
    everyone: str


class Answer(NamedTuple):
    call: str
    is_ok: bool
    content: bytes


Calls = Callable[..., Iterator[Answer]]


def leaks(answers: Sequence[Answer], secrets: Sequence[bytes]) -> list[str]:
    """The calls whose answers contain a secret."""
    return [answer.call for answer in answers if any(secret in answer.content for secret in secrets)]


def tenant(path: Path, name: str) -> Tenant:
    runs, word = [f"{name}-*"], WORDS[name]
    boss = create_token(path, f"{word}-boss", ROLES, runs, None)
    document = yaml.safe_load(path.read_text())
    document["tokens"][-1] |= {"max_runs": 4, "max_groups": 50, "max_rows": 500, "max_requests": 20}
    path.write_text(yaml.safe_dump(document))
    return Tenant(name, boss, create_token(path, f"{word}-scraper", ["scraper"], runs, None))


def fill(service: Service, tenant: Tenant) -> None:
    """Gives the tenant a run with a batch that waits for memory, one with a failed batch, one whose quota is used up
    and one for calls that change something."""
    with opened(service, tenant) as api:
        for state in ("waits", "fails", "full", "scratch"):
            odd = {"n_samples_per_prompt": 3, "dp_size": 4, "micro_batch": {"max_tokens": 8}, "on_misaligned": "error"}
            api.create(tenant.run(state), RUN | (odd if state == "fails" else {}))
        api.submit(tenant.run("waits"), tenant.rows("published"))
        api.submit(tenant.run("waits"), tenant.rows("large", 20_000))
        api.submit(tenant.run("waits"), tenant.rows("open", samples=1))
        api.submit(tenant.run("fails"), tenant.rows("odd", samples=3))
        api.submit(tenant.run("full"), [one for number in range(2) for one in tenant.rows(f"u{number}")])
        with pytest.raises(Refused, match="max_run_rows"):
            api.submit(tenant.run("full"), [one for number in range(4) for one in tenant.rows(f"v{number}")])
        api.begin(tenant.run("scratch"), [f"{tenant.word}-gone"])
        api.abort_groups(tenant.run("scratch"), [f"{tenant.word}-gone"], f"{tenant.word}-reason")
        wait_until(lambda: bool(service.runs.get(tenant.run("waits")).blocked_reason))
        wait_until(lambda: api.batch(tenant.run("waits"), 0)["state"] == "published")
        wait_until(lambda: '"state":"failed"' in health(service, tenant, "fails"))


@contextmanager
def opened(service: Service, tenant: Tenant) -> Iterator[HttpApi]:
    with closing(HttpApi(service.http_url)) as api:
        api.client.headers.update(shown(tenant.boss))
        yield api


def health(service: Service, tenant: Tenant, state: str) -> str:
    path = f"/v1/runs/{tenant.run(state)}/health"
    return httpx.get(service.http_url + path, headers=shown(tenant.boss), trust_env=False).text


def shown(token: str | None) -> dict[str, str]:
    return {} if token is None else {"authorization": f"Bearer {token}"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    path = tmp_path_factory.mktemp("tokens") / "tokens.yaml"
    tenants = {name: tenant(path, name) for name in WORDS}
    everyone = create_token(path, "everyone", ["scraper"], ["*"], None)
    limits: Json = {"max_runs": 8, "max_run_rows": 10, "max_run_groups": 40, "max_run_requests": 20}
    settings = Settings(**FREE_PORTS, store="memory", shutdown_grace_s=5, tokens_file=path, **limits)
    service = Service(settings)
    with ExitStack() as running, pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "memory_room", lambda: MemoryRoom(FREE_BYTES, 10 * FREE_BYTES))
        running.callback(service.stop)
        service.start()
        for one in tenants.values():
            fill(service, one)
        waits = [threading.Thread(target=wait, args=(service, one)) for one in tenants.values()]
        for thread in waits:
            thread.start()
        wait_until(lambda: service.long_poll.count == len(waits))
        yield Shared(service, tenants, everyone)


def wait(service: Service, tenant: Tenant) -> None:
    path = f"/v1/runs/{tenant.run('waits')}/policy-version?at_least=9&wait_s=30"
    httpx.get(service.http_url + path, headers=shown(tenant.boss), trust_env=False)


class Route(NamedTuple):
    """A call over HTTP, with the names of its parameters in the query and of its body's fields."""

    method: str
    path: str
    query: list[str]
    fields: list[str]


def routes(service: Service, tenant: Tenant) -> list[Route]:
    """All calls over HTTP, as the service describes them; those that delete last."""
    document = httpx.get(f"{service.http_url}/openapi.json", headers=shown(tenant.boss), trust_env=False).json()
    routes = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            query = [one["name"] for one in operation.get("parameters", ()) if one["in"] == "query"]
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
            fields = document["components"]["schemas"].get(name, {}).get("properties", {})
            routes.append(Route(method, path, query, list(fields)))
    return sorted(routes, key=lambda route: (route.method == "delete", route.path.endswith("/finish")))


def over_http(shared: Shared, tenant: Tenant, token: str | None, run: str | None = None) -> Iterator[Answer]:
    """The answers to all calls over HTTP with the tenant's names. run: instead of its own."""
    with httpx.Client(base_url=shared.service.http_url, headers=shown(token), trust_env=False) as client:
        for route in routes(shared.service, tenant):
            values = tenant.values(run or tenant.run("waits" if route.method == "get" else "scratch"))
            if route.path == "/v1/session":
                values["token"] = token
            answer = client.request(
                route.method,
                route.path.format(**{name: quote(str(one)) for name, one in values.items()}),
                params={name: values[name] for name in route.query if name in values},
                json={name: values[name] for name in route.fields if name in values} if route.fields else None,
            )
            yield Answer(
                f"{route.method} {route.path}", answer.is_success, str(answer.headers).encode() + answer.content
            )


def over_grpc(shared: Shared, tenant: Tenant, token: str | None, run: str | None = None) -> Iterator[Answer]:
    """The same over gRPC."""
    with grpc.insecure_channel(shared.service.grpc_address) as channel:
        for method in sorted(METHODS, key=lambda method: LAST.index(method.name) if method.name in LAST else -1):
            values = tenant.values(run or tenant.run("scratch" if method.name in CHANGES else "waits"))
            request: Any = GetMessageClass(method.input_type)()
            fields = {name: values[name] for name in method.input_type.fields_by_name if name in values}
            if method.name == "SubmitRows":
                fields.pop("rows")
                request.rows.CopyFrom(rows_message(values["rows"]))
            if "rewards" in fields:
                fields["rewards"] = [{"trajectory": one, "value": 1.0} for one in values["trajectories"]]
            if "model" in fields:
                fields["model"] = "MODEL_POLICY"
            json_format.ParseDict(fields, request)
            kind = ("stream" if method.client_streaming else "unary") + (
                "_stream" if method.server_streaming else "_unary"
            )
            bound = getattr(channel, kind)(f"/{method.containing_service.full_name}/{method.name}")
            data = request.SerializeToString()
            try:
                answer: Any = bound(
                    iter([data]) if method.client_streaming else data, metadata=tuple(shown(token).items()), timeout=30
                )
                content, is_ok = b"".join(answer) if method.server_streaming else answer, True
            except grpc.RpcError as error:
                call: Any = error
                content, is_ok = f"{call.details()} {call.trailing_metadata()}".encode(), False
            yield Answer(method.name, is_ok, content)


def renewed(shared: Shared, tenant: Tenant) -> None:
    """Creates the run for calls that change something again, in case it was deleted."""
    with opened(shared.service, tenant) as api:
        api.create(tenant.run("scratch"), RUN)
        api.submit(tenant.run("scratch"), tenant.rows("open", samples=1))


APIS = pytest.mark.parametrize("calls", [over_http, over_grpc], ids=["http", "grpc"])
PAIRS = pytest.mark.parametrize(("name", "other"), [("a", "b"), ("b", "a")])


@APIS
@PAIRS
def test_no_answer_to_a_tenant_names_anything_of_the_other(shared: Shared, calls: Calls, name: str, other: str) -> None:
    tenant, stranger = shared.tenants[name], shared.tenants[other]
    renewed(shared, tenant)
    answers = list(calls(shared, tenant, tenant.boss))
    assert not leaks(answers, stranger.secrets)
    assert {answer.call for answer in answers if not answer.is_ok} <= REFUSED
    assert leaks(answers, tenant.secrets[:1]), "it reads its own names"


@APIS
@PAIRS
def test_calls_for_a_run_of_the_other_tenant_show_nothing_of_it(
    shared: Shared, calls: Calls, name: str, other: str
) -> None:
    tenant, stranger = shared.tenants[name], shared.tenants[other]
    run = stranger.run("waits")
    answers = list(calls(shared, tenant, tenant.boss, run))
    echoed = [answer._replace(content=answer.content.replace(run.encode(), b"")) for answer in answers]
    assert not leaks(echoed, stranger.secrets)


@APIS
def test_callers_without_a_token_read_no_name(shared: Shared, calls: Calls) -> None:
    answers = list(calls(shared, shared.tenants["a"], None))
    assert not leaks([answer for answer in answers if answer.is_ok], [*map(str.encode, WORDS.values())])
    assert any(answer.is_ok and b"the health of that run reports why" in answer.content for answer in answers)


@PAIRS
def test_a_scraper_reads_no_name_of_the_other_tenant_in_any_label(shared: Shared, name: str, other: str) -> None:
    tenant, stranger = shared.tenants[name], shared.tenants[other]
    url = f"{shared.service.http_url}/metrics"
    text = httpx.get(url, headers=shown(tenant.scraper), trust_env=False).text
    assert not leaks([Answer("metrics", True, text.encode())], stranger.secrets)
    own = [f'quota="max_run_rows",run="{tenant.run("full")}"', f'caller="{tenant.word}-boss",quota="max_requests"']
    for labels in own:
        assert labels in text, "it reads its own runs' quotas, and those of callers of the same runs"
    everything = httpx.get(url, headers=shown(shared.everyone), trust_env=False).text
    assert all(one.run("full") in everything and f"{one.word}-boss" in everything for one in shared.tenants.values())


@PAIRS
def test_doctor_and_refusals_name_nothing_of_the_other_tenant(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, name: str, other: str
) -> None:
    tenant, stranger = shared.tenants[name], shared.tenants[other]
    monkeypatch.setenv("GRISTMILL_TOKEN", tenant.boss)
    port = int(shared.service.http_url.rpartition(":")[2])
    texts = [str(check) for check in check_replicas(shared.service.grpc_address, port)]
    assert "accepts no new work; resolve 'batches of a run wait" in " ".join(texts)
    renewed(shared, tenant)
    refused: list[Callable[[HttpApi], object]] = [
        lambda api: api.create(tenant.run("more"), RUN),
        lambda api: api.create(tenant.run("waits"), RUN | {"max_buffered_batches": 7}),
        lambda api: api.get(tenant.run("unknown")),
        lambda api: api.create(stranger.run("waits")[:-1], RUN),
        lambda api: api.submit(tenant.run("full"), [one for n in range(9) for one in tenant.rows(f"v{n}")]),
    ]
    for call in refused:
        with opened(shared.service, tenant) as api, pytest.raises(Refused) as caught:
            call(api)
        texts.append(caught.value.message.replace(stranger.run("waits")[:-1], ""))
    with opened(shared.service, tenant) as api:
        texts += [str(read(tenant.run("fails"))) for read in (api.get, api.groups, lambda run: api.shard(run, 0))]
    texts += [health(shared.service, tenant, state) for state in ("waits", "fails", "full", "scratch")]
    assert f"run '{tenant.run('waits')}': batch 1 waits" in texts[-4], "its own health says which run and batch waits"
    assert not leaks([Answer(text, True, text.encode()) for text in texts], stranger.secrets)
