"""Flame graphs of submission, of client and service, by py-spy, into build/profiles.

`pip install py-spy` first. `python -m tests.tools.bench.flame` records all; with KIND ADDRESS it is the client that
submits again and again until it is ended. Frames are functions with their files below the project or the environment.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import time
from pathlib import Path

from gristmill import RolloutClient
from tests.tools.bench.processes import served
from tests.tools.bench.submit import LONG, LONG_ROWS, TURNS, _config, _delete, _submitting, generator_output, turn_rows

PROFILES = Path("build/profiles")
SECONDS, RATE = 12, 250
"""The length of a recording, and samples per second."""
_PATH = re.compile(r"/[\w./+-]*/(?=(?:gristmill|gristmill_service|tests|grpc|numpy)/|[\w.-]+\.py|py-spy)")


def main() -> None:
    PROFILES.mkdir(parents=True, exist_ok=True)
    for kind in ("long", "turn"):
        with served() as service:
            command = [sys.executable, "-m", "tests.tools.bench.flame", kind, service.grpc_address]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
                assert client.stdout is not None
                client.stdout.readline()
                pids = {"client": client.pid, "service": service.process.pid}
                started = [_record(pid, PROFILES / f"submit-{kind}-{side}.svg") for side, pid in pids.items()]
                for recorder in started:
                    recorder.wait()
                client.terminate()
    for path in PROFILES.glob("submit-*.svg"):
        path.write_text(_PATH.sub("", path.read_text()))
        print(path, f"{path.stat().st_size >> 10} KiB")


def _record(pid: int, path: Path) -> subprocess.Popen[bytes]:
    spy = str(Path(sys.executable).with_name("py-spy"))
    return subprocess.Popen([spy, "record", "-F", "-d", str(SECONDS), "-r", str(RATE), "-p", str(pid), "-o", str(path)])


def _again_and_again(kind: str, address: str) -> None:
    turns = turn_rows(TURNS)
    once = _submitting(address, generator_output(LONG_ROWS, LONG))
    for number in itertools.count():
        if kind == "long":
            once()
        else:
            with RolloutClient(address, f"turns-{number}") as client:
                client.create_run(_config())
                for row in turns:
                    client.submit([row])
            _delete(address, f"turns-{number}")
        if number == 0:
            print("warm", flush=True)
            time.sleep(0.1)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        _again_and_again(*sys.argv[1:])
