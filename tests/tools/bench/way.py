"""The way of a call through the code: how many of our functions, in how many files, one call runs in the service.

`python -m tests.tools.bench.way` prints it for a submission that seals nothing and an acknowledgement that commits and
frees; `--list` names the functions. Comprehensions and lambdas do not count.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from gristmill._client.connection.transport import Transport
from gristmill._wire.codecs import row_codec
from gristmill._wire.rows import from_rows
from gristmill.v1 import rollout_pb2, run_pb2, trainer_pb2
from gristmill_service.settings import Settings
from tests.on_loop import Service, loop, on_loop
from tests.rows import make_config
from tests.serving import FREE_PORTS

_OURS = ("/gristmill_service/", "/gristmill/_wire/")
_ANONYMOUS = frozenset(["<lambda>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<module>"])
_ROUNDS = 6
_CONFIG = make_config(n_samples_per_prompt=2, step_wise=False)


class Way(NamedTuple):
    """functions: how often each was called."""

    functions: Counter[CodeType]

    @property
    def files(self) -> set[str]:
        return {code.co_filename for code in self.functions}


class _Recorder:
    """Notes the calls of the service's threads while it is on."""

    def __init__(self) -> None:
        self.is_on, self.calls = False, Counter[CodeType]()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.is_on and event == "call":
            code = frame.f_code
            if code.co_name not in _ANONYMOUS and any(part in code.co_filename for part in _OURS):
                self.calls[code] += 1

    @contextmanager
    def on(self) -> Iterator[Counter[CodeType]]:
        self.calls = Counter()
        self.is_on = True
        try:
            yield self.calls
        finally:
            # The answer comes before the last of what follows from the call.
            time.sleep(0.1)
            self.is_on = False


def ways() -> dict[str, Way]:
    """Measures both calls, with a journal and shared memory."""
    recorder = _Recorder()
    # Of the threads that start from now on, and of the loop.
    threading.setprofile(recorder)
    on_loop(sys.setprofile, recorder)
    try:
        with tempfile.TemporaryDirectory() as directory:
            flags: dict[str, Any] = {"shared_memory_dir": directory, "log_level": "error"}
            flags |= {} if "--memory" in sys.argv else {"journal_dir": Path(directory) / "journal"}
            service = Service(Settings(**FREE_PORTS, **flags, shutdown_grace_s=5))
            service.start()
            try:
                return _measured(service, recorder)
            finally:
                service.stop()
    finally:
        threading.setprofile(None)
        loop().call_soon_threadsafe(sys.setprofile, None)


def _measured(service: Service, recorder: _Recorder) -> dict[str, Way]:
    transport = Transport(service.grpc_address, 60.0, "way")
    config = json.dumps(_CONFIG)
    transport.call(transport.runs.CreateRun, run_pb2.CreateRunRequest(run="way", config_json=config))
    submissions, acknowledgements = list[Counter[CodeType]](), list[Counter[CodeType]]()
    for batch in range(_ROUNDS):
        with recorder.on() as submission:
            _submit(transport, f"u{batch}", 0)
        _submit(transport, f"u{batch}", 1)
        _until_published(transport, batch)
        with recorder.on() as acknowledgement:
            _acknowledge(transport, batch)
        submissions.append(submission)
        acknowledgements.append(acknowledgement)
    transport.close()
    # The first of a run does more, and timers fall into some of them.
    return {"SubmitRows": Way(min(submissions, key=len)), "Acknowledge": Way(min(acknowledgements, key=len))}


def _submit(transport: Transport, uid: str, sample: int) -> None:
    row = {"uid": uid, "sample": sample, "prompt_token_ids": [1, 2], "response_ids": [3], "loss_mask": [1]} | {
        "step": 0,
        "is_last_step": True,
    }
    rows = row_codec.encode(from_rows([row | {"reward": float(sample)}]))
    transport.call(transport.rollouts.SubmitRows, rollout_pb2.SubmitRowsRequest(run="way", rows=rows))


def _until_published(transport: Transport, batch: int) -> None:
    transport.call(
        transport.trainers.GetBatch, trainer_pb2.GetBatchRequest(run="way", batch=batch, wait_s=30), wait_s=30
    )


def _acknowledge(transport: Transport, batch: int) -> None:
    position = run_pb2.Position(batch=batch)
    request = trainer_pb2.AcknowledgeRequest(run="way", model=run_pb2.MODEL_POLICY, position=position, commit=True)
    transport.call(transport.trainers.Acknowledge, request)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.bench.way", description=__doc__)
    parser.add_argument("--memory", action="store_true", help="without a journal")
    parser.add_argument("--list", action="store_true", help="name the functions, by file")
    asked = parser.parse_args()
    for name, way in ways().items():
        print(f"{name}: {len(way.functions)} functions in {len(way.files)} files, {way.functions.total()} calls")
        for code, count in sorted(way.functions.items(), key=lambda one: (one[0].co_filename, one[0].co_firstlineno)):
            if asked.list:
                print(
                    f"  {code.co_filename.rpartition('/gristmill')[2]}:{code.co_firstlineno} {code.co_qualname} {count}"
                )


if __name__ == "__main__":
    main()
