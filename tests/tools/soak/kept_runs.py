"""What kept finished runs cost: memory, descriptors, series and tasks of a service, while open and when dormant.

python -m tests.tools.soak.kept_runs --runs 240
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from gristmill import RolloutClient, TrainerClient
from tests.redis.servers import RedisServer
from tests.tools.soak.probed import InUse, Probed, start

CONFIG = {
    "train_batch_size": 2,
    "n_samples_per_prompt": 2,
    "policy_mini_batch_size": 2,
    "micro_batch": {"size": 4},
    "step_wise": True,
}
_PATIENCE_S = 120.0


class Served(NamedTuple):
    """A service that is ready. ready_s: how long it took."""

    probed: Probed
    grpc_address: str
    http_url: str
    ready_s: float

    def get(self, path: str) -> str:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{self.http_url}{path}") as answer:
            return str(answer.read().decode())

    @property
    def series(self) -> int:
        return sum(not line.startswith("#") for line in self.get("/metrics").splitlines())

    def metric(self, name: str) -> float:
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith(name)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


def serve(directory: Path, name: str, dormant_s: float, *flags: str) -> Served:
    """Starts a service on free ports. Returns when it is ready."""
    announced, began = directory / f"{name}.json", time.monotonic()
    announced.unlink(missing_ok=True)
    (directory / f"{name}.sock").unlink(missing_ok=True)
    free = ["--grpc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--announce", str(announced)]
    probed = start(directory, name, dormant_s, ["gristmill", "serve", *free, *flags])
    assert probed.process.stdout is not None
    if "is ready" not in probed.process.stdout.readline():
        probed.stop()
        raise RuntimeError(f"{name} did not start: {(directory / f'{name}.log').read_text()}")
    addresses = json.loads(announced.read_text())
    return Served(probed, addresses["grpc_address"], addresses["http_url"], time.monotonic() - began)


def end_run(address: str, name: str) -> None:
    """Creates a run, trains its one batch and finishes it."""
    with RolloutClient(address, name) as client:
        client.create_run(CONFIG)
        for uid in client.begin_groups([f"{name}-a", f"{name}-b"]):
            for sample in range(2):
                with client.trajectory(uid, sample) as trajectory:
                    trajectory.step([1, 2, 3], [4, 5], reward=float(sample), is_last_step=True)
        client.finish()
    with TrainerClient(address, name, 0, auto_commit=True) as trainer:
        for batch in trainer:
            for shard in batch.mini_batches():
                shard.ack()


def measure(served: Served, count: int) -> None:
    """Prints what `count` runs add to a service that had ten. Runs that become dormant before the last one is made
    lower the figures of open ones."""
    for number in range(10):
        end_run(served.grpc_address, f"first-{number}")
    _await_dormant(served, 10)
    before, series = served.probed.in_use(), served.series
    for number in range(count):
        end_run(served.grpc_address, f"run-{number:05d}")
    for state in ("open", "dormant"):
        if state == "dormant":
            _await_dormant(served, 10 + count)
        after = served.probed.in_use()
        _print(state, count, after, before, served.series - series)
    print(f"  waiting calls {served.metric('gristmill_waiting_calls'):.0f}, tasks {after.tasks - before.tasks:+d}")


def _await_dormant(served: Served, count: int) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while served.metric('gristmill_leases{state="dormant"}') < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{count} runs are not dormant after {_PATIENCE_S:.0f} s")
        time.sleep(0.2)
    time.sleep(2.0)


def _print(state: str, count: int, after: InUse, before: InUse, series: int) -> None:
    nbytes, descriptors = after.bytes - before.bytes, after.descriptors - before.descriptors
    print(
        f"  {state}: {nbytes / count / 1000:.1f} KB, {descriptors / count:.2f} descriptors and {series / count:.2f} "
        f"series a run, of {count}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=240)
    parser.add_argument("--dormant-s", type=float, default=20.0, help="seconds without calls, instead of an hour")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as opened:
        directory = Path(name)
        memory = ["--shared-memory-dir", name]
        journal = ["--journal-dir", str(directory / "runs"), *memory]
        empty = serve(directory, "empty", asked.dormant_s, "--journal-dir", str(directory / "none"), *memory)
        print(f"a service with a journal; ready after {empty.ready_s:.1f} s without runs")
        empty.probed.stop()
        served = serve(directory, "journal", asked.dormant_s, *journal)
        measure(served, asked.runs)
        served.probed.stop()
        served = serve(directory, "journal", asked.dormant_s, *journal)
        opened.callback(served.probed.stop)
        names = len(json.loads(served.get("/v1/runs"))["runs"])
        print(f"  ready after {served.ready_s:.1f} s with {names} dormant runs")
        server = opened.enter_context(RedisServer(directory / "redis", appendonly="no"))
        flags = ["--store", "redis", "--redis-url", server.url]
        replicas = [serve(directory, f"replica-{number}", asked.dormant_s, *flags) for number in range(2)]
        for replica in replicas:
            opened.callback(replica.probed.stop)
        other = replicas[1].probed
        print("two replicas on Redis: the one that is called")
        before = other.in_use()
        used: int = server.client().info()["used_memory"]
        measure(replicas[0], asked.runs)
        print("the other")
        _print("dormant", asked.runs, other.in_use(), before, 0)
        print(f"  Redis: {(server.client().info()['used_memory'] - used) / asked.runs / 1000:.1f} KB a run")


if __name__ == "__main__":
    main()
