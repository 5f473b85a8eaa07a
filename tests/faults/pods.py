"""Replicas as pods of a network of this process's own: a restarted one has another address, and a gone address drops
packets.

`unshare --net --mount python -m tests.faults.pods DIRECTORY` restarts three replicas one after another under load, and
prints the seconds of each client's longest call as JSON, by how the client names the service.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from gristmill import RolloutClient
from tests.faults.services import CONFIG, Service, group, on_redis
from tests.redis.servers import RedisServer

COUNT, PORT, RUN = 3, 7000, "restarts"
COMMAND = [sys.executable, "-c", "from gristmill_service.cli import main; main()", "serve", "--shutdown-grace-s", "5"]
AWAY_S = 1.0
LONGEST_CALL_S = 60.0


class Network:
    """Its names stand in /etc/hosts. `name` is that of the ready pods, as of a Service."""

    name = "gristmill"

    def __init__(self, directory: Path) -> None:
        self._hosts, self._numbers = directory / "hosts", itertools.count(1)
        self._addresses: dict[str, str] = {}
        self.ready: set[str] = set()
        (directory / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        self._hosts.touch()
        _sh("ip link set lo up")
        # What is sent to an address that no pod has goes out here, and is gone.
        _sh("ip link add gone type veth peer name nowhere")
        _sh("ip addr add 10.77.0.254/24 dev gone")
        _sh("ip link set nowhere up")
        _sh("ip link set gone arp off up")
        for file in (self._hosts, directory / "resolv.conf"):
            _sh(f"mount --bind {file} /etc/{file.name}")

    def add(self, pod: str) -> str:
        self._addresses[pod] = address = f"10.77.0.{next(self._numbers)}"
        _sh(f"ip route add local {address} dev lo src 10.77.0.254")
        self.write()
        return address

    def remove(self, pod: str) -> None:
        _sh(f"ip route del local {self._addresses.pop(pod)} dev lo")
        self.write()

    def write(self) -> None:
        lines = [f"{address} {pod}" for pod, address in self._addresses.items()]
        lines += [f"{self._addresses[pod]} {self.name}" for pod in sorted(self.ready)]
        self._hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))


class Pod:
    """A replica, which its network names."""

    def __init__(self, network: Network, name: str, redis_url: str, directory: Path) -> None:
        self._network, self.name, self._url, self._directory = network, name, redis_url, directory

    def start(self) -> None:
        address = self._network.add(self.name)
        command = [*COMMAND, *on_redis(self._url), "--announce", str(self._directory / f"{address}.json")]
        command += ["--grpc-address", f"{address}:{PORT}", "--http-address", f"{address}:{PORT + 1}"]
        self._service = Service([*command, "--insecure"], self._directory / f"{address}.json")

    def ready(self) -> None:
        self._service.ready()
        self._network.ready.add(self.name)
        self._network.write()

    def stop(self) -> None:
        self._network.ready.discard(self.name)
        self._network.write()
        self._service.stop()
        self._network.remove(self.name)


class Worker(threading.Thread):
    """Submits groups one after another, each with a call of its own."""

    def __init__(self, name: str, address: str) -> None:
        super().__init__(name=name)
        self._address, self.longest_s, self.calls, self.is_over = address, 0.0, 0, threading.Event()

    def run(self) -> None:
        with RolloutClient(self._address, RUN, timeout_s=LONGEST_CALL_S) as client:
            while not self.is_over.is_set():
                began = time.monotonic()
                client.submit(group(f"{self.name}-{self.calls}"))
                self.longest_s, self.calls = max(self.longest_s, time.monotonic() - began), self.calls + 1
                time.sleep(0.05)


def main(directory: Path) -> None:
    network = Network(directory)
    with ExitStack() as opened:
        redis = opened.enter_context(RedisServer(directory / "redis", appendonly="no"))
        pods = [Pod(network, f"{network.name}-{number}", redis.url, directory) for number in range(COUNT)]
        for pod in pods:
            pod.start()
            opened.callback(pod.stop)
        for pod in pods:
            pod.ready()
        listed = ",".join(f"{pod.name}:{PORT}" for pod in pods)
        with RolloutClient(listed, RUN) as client:
            client.create_run(CONFIG | {"train_batch_size": 10_000})
        addresses = {"list": listed, "name": f"{network.name}:{PORT}"}
        workers = [Worker(f"{by}-{number}", address) for by, address in addresses.items() for number in range(2)]
        for worker in workers:
            worker.start()
        for pod in pods:
            pod.stop()
            time.sleep(AWAY_S)
            pod.start()
            pod.ready()
        for worker in workers:
            worker.is_over.set()
            worker.join()
        print(json.dumps({worker.name: round(worker.longest_s, 2) for worker in workers}))


def _sh(command: str) -> None:
    subprocess.run(command.split(), check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
