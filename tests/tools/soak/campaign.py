"""A deployment that works in rounds: a service with a journal, its recorder, two replicas on Redis, and clients.

Each part is a process that reports what it has in use. After a round it is left alone until what ended is closed.
"""

from __future__ import annotations

import json
import os
import ssl
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import trustme

from gristmill import RolloutClient, TrainerClient
from gristmill._client.connection.credentials import Credentials
from gristmill_service.storage.redis.keys import RunKeys
from tests.api.apis import GrpcApi
from tests.recorder.engine import Engine, serving
from tests.recorder.recorders import CONFIG as RECORDED
from tests.recorder.recorders import Recorder, post
from tests.redis.servers import RedisServer
from tests.tools.soak.clients import CONFIG, Round
from tests.tools.soak.probed import Probed, start
from tests.tools.soak.slopes import Readings, Work

LONG = "long"
"""The name of the run that goes on."""
DORMANT_S = 3.0
KEPT_RECORDS = 1_100
"""Batches after which a run gains no more records of them."""
_PATIENCE_S, _SETTLE_S = 120.0, 2.0
_TIMED = 15
SHORT: dict[str, Any] = {
    "train_batch_size": 2,
    "n_samples_per_prompt": 2,
    "policy_mini_batch_size": 2,
    "micro_batch": {"size": 4},
    "step_wise": True,
}


class Plan(NamedTuple):
    """A round. batches: of the long run of each store. dropped: groups of the long run on the journal that are begun
    and aborted. deleted, kept: short runs of each store. recorded: runs through the recorder, of which one is kept.
    renewals: of certificates."""

    batches: int = 30
    dropped: int = 1_000
    deleted: int = 5
    kept: int = 2
    recorded: int = 3
    renewals: int = 2


class Served:
    """A service that is ready."""

    def __init__(self, probed: Probed, grpc_address: str, http_url: str, credentials: Credentials) -> None:
        self.probed, self.grpc_address, self.http_url, self.credentials = probed, grpc_address, http_url, credentials

    def get(self, path: str) -> str:
        return _read(f"{self.http_url}{path}", self.credentials.ca_file)

    def metric(self, scraped: str, name: str) -> float:
        return sum(float(line.rpartition(" ")[2]) for line in scraped.splitlines() if line.startswith(name))


def _read(url: str, ca_file: Path | str | None = None) -> str:
    context = None if ca_file is None else ssl.create_default_context(cafile=ca_file)
    handlers: list[Any] = [urllib.request.ProxyHandler({})]
    if context is not None:
        handlers.append(urllib.request.HTTPSHandler(context=context))
    with urllib.request.build_opener(*handlers).open(url, timeout=60) as answer:
        return str(answer.read().decode())


def _series(scraped: str) -> int:
    return sum(not line.startswith("#") for line in scraped.splitlines())


class Files:
    """The certificates of the replicas and of their clients, which can be renewed."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._authority = directory, trustme.CA()
        self.ca_file = directory / "ca.pem"
        self._authority.cert_pem.write_to_path(str(self.ca_file))
        self.cert, self.key = directory / "cert.pem", directory / "cert.key"
        self.renew()

    def renew(self) -> None:
        issued = self._authority.issue_cert("localhost", "127.0.0.1")
        for path, content in (
            (self.key, issued.private_key_pem.bytes()),
            (self.cert, b"".join(part.bytes() for part in issued.cert_chain_pems)),
        ):
            draft = path.with_suffix(".draft")
            draft.write_bytes(content)
            draft.replace(path)

    @property
    def credentials(self) -> Credentials:
        return Credentials(ca_file=self.ca_file)


class Clients:
    """A process of long-lived clients."""

    def __init__(self, probed: Probed) -> None:
        self.probed = probed

    def begin(self, wanted: Round) -> None:
        assert self.probed.process.stdin is not None
        self.probed.process.stdin.write(json.dumps(wanted) + "\n")
        self.probed.process.stdin.flush()

    def end(self) -> int:
        """Waits for the end of the round. Returns the number of groups that were begun."""
        assert self.probed.process.stdout is not None
        line = self.probed.process.stdout.readline()
        if not line:
            raise RuntimeError("the clients ended; see their log")
        return int(json.loads(line))


class Deployment:
    """All parts, in a directory. Use `deployed`."""

    def __init__(self, directory: Path, opened: ExitStack, plan: Plan) -> None:
        self._directory, self._opened, self._plan = directory, opened, plan
        self._batches = self._rounds = self._kept = self._recorded = 0
        self.files = Files(directory)
        self.journal = self._serve(
            "journal", Credentials(), "--journal-dir", str(directory / "runs"), "--shared-memory-dir", str(directory)
        )
        self._redis = opened.enter_context(RedisServer(directory / "redis", appendonly="no"))
        flags = ["--store", "redis", "--redis-url", self._redis.url, "--tls-cert-file", str(self.files.cert)]
        flags += ["--tls-key-file", str(self.files.key), "--tls-peer-ca-file", str(self.files.ca_file)]
        self.replicas = [self._serve(f"replica {number}", self.files.credentials, *flags) for number in (1, 2)]
        self._engine = opened.enter_context(serving(Engine()))
        self.recorder, self._recorder = self._record()
        for address, credentials in (
            (self.journal.grpc_address, Credentials()),
            (self.replicas[0].grpc_address, self.files.credentials),
        ):
            with RolloutClient(address, LONG, credentials=credentials) as client:
                client.create_run(CONFIG)
        self._api = GrpcApi(self.journal.grpc_address)
        opened.callback(self._api.close)
        both = ",".join(one.grpc_address for one in self.replicas)
        self.clients = self._clients("clients", "sync", self.journal.grpc_address)
        # They present certificates that the replicas do not require, and connect anew when these are renewed.
        certificates = {"CA_FILE": self.files.ca_file, "CERT_FILE": self.files.cert, "KEY_FILE": self.files.key}
        with _environment({f"GRISTMILL_{name}": str(path) for name, path in certificates.items()}):
            self.async_clients = self._clients("async clients", "async", both)

    # --- Its parts

    def _start(self, name: str, command: list[str]) -> Probed:
        probed = start(self._directory, name.replace(" ", "-"), DORMANT_S, command)
        self._opened.callback(probed.stop)
        return probed

    def _ready(self, name: str, probed: Probed) -> str:
        assert probed.process.stdout is not None
        line = probed.process.stdout.readline()
        if "is ready" not in line:
            raise RuntimeError(
                f"{name} did not start: {(self._directory / name.replace(' ', '-')).with_suffix('.log')}"
            )
        return line

    def _serve(self, name: str, credentials: Credentials, *flags: str) -> Served:
        announced = self._directory / f"{name.replace(' ', '-')}.json"
        free = ["--grpc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--announce", str(announced)]
        probed = self._start(name, ["gristmill", "serve", "--log-level", "warning", *free, *flags])
        self._ready(name, probed)
        addresses = json.loads(announced.read_text())
        return Served(probed, addresses["grpc_address"], addresses["http_url"], credentials)

    def _record(self) -> tuple[Probed, Recorder]:
        command = ["gristmill", "record", "--upstream", self._engine.url, "--address", self.journal.grpc_address]
        command += ["--http-address", "127.0.0.1:0", "--journal", str(self._directory / "recorder.sqlite3")]
        probed = self._start("recorder", [*command, "--keep-closed-s", "5"])
        url = self._ready("recorder", probed).split("ready: ")[1].split()[0]
        return probed, Recorder(probed.process, url, self._directory / "recorder.log")

    def _clients(self, name: str, kind: str, addresses: str) -> Clients:
        return Clients(self._start(name, ["tests.tools.soak.clients", kind, addresses, LONG]))

    # --- Work

    def warm_up(self) -> None:
        """Fills the records of batches, of which a run keeps a number."""
        self._long_runs(Round(0, KEPT_RECORDS, is_whole=True))

    def work(self) -> dict[str, Work]:
        """Makes a round. Returns what it made, by part."""
        plan, history = self._plan, self._batches < KEPT_RECORDS
        self._rounds += 1
        groups = self._long_runs(Round(self._batches, plan.batches), self._between)
        on_journal = Work(plan.batches, groups + plan.dropped, plan.kept + 1, history)
        on_redis = Work(plan.batches, groups, plan.kept, history)
        by_part = {"journal": on_journal, "replica 1": on_redis, "replica 2": on_redis, "redis": on_redis}
        clients = Work(plan.batches, groups, 0, False)
        return by_part | {"clients": clients, "async clients": clients, "recorder": Work(0, 0, 0, False)}

    def _long_runs(self, wanted: Round, meanwhile: Callable[[], None] = lambda: None) -> int:
        both = (self.clients, self.async_clients)
        for clients in both:
            clients.begin(wanted)
        meanwhile()
        self._batches = wanted.first + wanted.batches
        return max(clients.end() for clients in both)

    def _between(self) -> None:
        """What happens next to the long runs."""
        plan, number = self._plan, self._rounds
        for renewal in range(plan.renewals):
            self.files.renew()
            for index in range(plan.deleted + plan.kept):
                if index % plan.renewals != renewal:
                    continue
                self._short_run(f"short-{number}-{index}", index < plan.deleted)
        uids = [f"dropped-{number:06d}-{index}" for index in range(plan.dropped)]
        for first in range(0, len(uids), 100):
            some = uids[first : first + 100]
            begun = self._api.begin(LONG, some)
            self._api.abort_groups(LONG, [uid for uid, one in zip(some, begun, strict=True) if one == "admitted"], "no")
        for index in range(plan.recorded):
            self._record_run(f"recorded-{number}-{index}", is_deleted=index > 0)
        for served in (self.journal, *self.replicas):
            served.get("/v1/overview")
            served.get("/")
        self._kept += plan.kept
        self._recorded += 1

    def _short_run(self, name: str, is_deleted: bool) -> None:
        one, two = self.replicas
        _end_run(self.journal.grpc_address, self.journal.grpc_address, name, Credentials(), is_deleted)
        _end_run(one.grpc_address, two.grpc_address, name, self.files.credentials, is_deleted)

    def _record_run(self, name: str, is_deleted: bool) -> None:
        address = self.journal.grpc_address
        with RolloutClient(address, name, timeout_s=30) as client:
            client.create_run(RECORDED)
            for sample in ("a", "b"):
                body = {"model": "model", "messages": [{"role": "user", "content": "say yes"}]}
                status, answer = post(f"{self._recorder.base(name, sample)}/v1/chat/completions", body)
                if status != 200:
                    raise RuntimeError(f"the recorder answered {status}: {answer}")
                self._recorder.finish(name, 1.0, sample)
            client.finish()
            _train(address, name, Credentials())
            if is_deleted:
                client.delete_run()

    # --- Readings

    def settle(self) -> None:
        """Returns when every run that ended is closed, and nothing waits."""
        deadline = time.monotonic() + _PATIENCE_S
        wanted = [(self.journal, self._kept + self._recorded), *((one, self._kept) for one in self.replicas)]
        for served, count in wanted:
            while served.metric(served.get("/metrics"), 'gristmill_leases{state="dormant"}') < count:
                if time.monotonic() > deadline:
                    # The readings show what stayed open.
                    return
                time.sleep(0.2)
        time.sleep(_SETTLE_S)

    def read(self) -> Readings:
        """Returns the values of every quantity, by part."""
        readings = dict[tuple[str, str], float]()
        parts = {"journal": self.journal, "replica 1": self.replicas[0], "replica 2": self.replicas[1]}
        for name, probed in {
            **{name: served.probed for name, served in parts.items()},
            "recorder": self.recorder,
            "clients": self.clients.probed,
            "async clients": self.async_clients.probed,
        }.items():
            in_use = probed.in_use()
            readings[name, "client bytes" if "clients" in name else "bytes"] = in_use.bytes
            readings[name, "descriptors"] = in_use.descriptors
            readings[name, "threads"] = in_use.threads
            readings[name, "tasks"] = in_use.tasks
        for name, served in parts.items():
            scraped = served.get("/metrics")
            readings[name, "series"] = _series(scraped)
            readings[name, "metrics, bytes"] = len(scraped)
            readings[name, "waiting calls"] = served.metric(scraped, "gristmill_waiting_calls")
            readings[name, "open runs"] = served.metric(scraped, 'gristmill_leases{state="own"}')
        readings["recorder", "series"] = _series(_read(f"{self._recorder.url}/metrics"))
        shared = [path for path in self._directory.glob("gristmill-*/**/*") if path.is_file()]
        readings["journal", "shared memory files"] = len(shared)
        readings["journal", "journal files"] = sum(path.is_file() for path in (self._directory / "runs").rglob("*"))
        readings["journal", "status, bytes"] = len(self.journal.get(f"/v1/runs/{LONG}"))
        client = self._redis.client()
        readings["redis", "keys"] = int(client.dbsize())
        # The log of the long run grows to 16 MiB, and is then replaced by a snapshot.
        log = client.memory_usage(RunKeys("gristmill", LONG).log, samples=0) or 0
        readings["redis", "used_memory"] = int(client.info()["used_memory"]) - log
        for name, call in self._timed().items():
            readings["journal", f"{name}, ms"] = _milliseconds(call)
        return readings

    def _timed(self) -> dict[str, Callable[[], object]]:
        uids = [f"timed-{index}" for index in range(100)]
        self._api.begin(LONG, uids)
        self._api.abort_groups(LONG, uids, "no")
        return {
            "GetRun": lambda: self._api.get(LONG),
            "BeginGroups": lambda: self._api.begin(LONG, uids),
            "overview": lambda: self.journal.get("/v1/overview"),
            "scrape": lambda: self.journal.get("/metrics"),
        }


def _milliseconds(call: Callable[[], object]) -> float:
    """Returns the shortest time of some, which other load of the machine changes least."""
    times = []
    for _ in range(_TIMED):
        began = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - began))
    return min(times)


def _end_run(address: str, other: str, name: str, credentials: Credentials, is_deleted: bool) -> None:
    """Creates a run, trains its one batch and finishes it; deletes it through the other address if asked."""
    with RolloutClient(address, name, credentials=credentials) as client:
        client.create_run(SHORT)
        rows = [
            {"uid": uid, "sample": sample, "step": 0, "is_last_step": True, "reward": float(sample)}
            | {"prompt_token_ids": [1, 2], "response_ids": [3], "loss_mask": [1]}
            for uid in client.begin_groups(["a", "b"])
            for sample in range(2)
        ]
        client.submit(rows)
        client.finish()
    _train(address, name, credentials)
    if is_deleted:
        with RolloutClient(other, name, credentials=credentials) as client:
            client.delete_run()


def _train(address: str, name: str, credentials: Credentials) -> None:
    with TrainerClient(address, name, 0, auto_commit=True, credentials=credentials) as trainer:
        for batch in trainer:
            for shard in batch.mini_batches():
                shard.ack()


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def deployed(directory: Path, plan: Plan) -> Iterator[Deployment]:
    """Starts all parts; they end with the block."""
    with ExitStack() as opened:
        yield Deployment(directory, opened, plan)
