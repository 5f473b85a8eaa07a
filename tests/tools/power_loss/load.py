"""Workers, a trainer and short runs on a service whose disk is noted, and between its changes what was promised."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gristmill import GristmillError, RolloutClient, TrainerClient
from gristmill._torch.rows import Shard
from gristmill_service.storage.journal.run_log import Fsync
from tests.faults.services import Service
from tests.storage.dying_disk import Note, Promises, environment, read_notes

RUN = "run"
CONFIG = {
    "train_batch_size": 4,
    "n_samples_per_prompt": 2,
    "policy_mini_batch_size": 2,
    "micro_batch": {"size": 4},
    "dp_size": 1,
    "max_buffered_batches": 10_000,
    "max_staleness": 100_000,
}
SAMPLES = 2
_WORKERS, _COMMITS_EVERY, _MOST_AHEAD = 3, 3, 12


def rows(uid: str) -> list[dict[str, Any]]:
    """The group's rows, the same each time."""
    draw = random.Random(uid)
    length = draw.choice([20, 500, 8000])
    return [
        {
            "uid": uid,
            "sample": sample,
            "prompt_token_ids": [1, 2, 3],
            "response_ids": [draw.randrange(50_000) for _ in range(length)],
            "loss_mask": [1] * length,
            "reward": float(sample),
        }
        for sample in range(SAMPLES)
    ]


def uids_of(shard: Shard) -> set[str]:
    pairs = zip(shard.metadata["uids"], shard["is_padding"].tolist(), strict=True)
    return {uid for uid, is_padding in pairs if not is_padding}


class Load:
    def __init__(self, address: str, promises: Promises, seed: int) -> None:
        self._address, self._promises, self._seed = address, promises, seed
        self._stopped, self._errors = threading.Event(), list[BaseException]()
        self._ahead = threading.Semaphore(_MOST_AHEAD * CONFIG["train_batch_size"])  # type: ignore[operator]

    def run(self, seconds: float) -> None:
        with RolloutClient(self._address, RUN) as client:
            client.create_run(CONFIG)
            self._promises.note({"created": RUN})
        works: list[Callable[[], None]] = [self._train, self._churn]
        works += [lambda number=number: self._submit(number) for number in range(_WORKERS)]  # type: ignore[misc]
        threads = [threading.Thread(target=self._noting_errors, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        self._promises.note("end")
        self._stopped.set()
        for thread in threads[1:]:
            thread.join()
        # The trainer's wait for a batch ends.
        with RolloutClient(self._address, RUN) as client:
            client.finish()
        threads[0].join()
        if self._errors:
            raise self._errors[0]

    def _noting_errors(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised in the main thread
            self._errors.append(error)

    def _submit(self, worker: int) -> None:
        draw, number = random.Random(self._seed + worker), 0
        with RolloutClient(self._address, RUN) as client:
            while not self._stopped.is_set():
                if not self._ahead.acquire(timeout=0.1):
                    continue
                uid = f"w{worker}-{number}"
                self._promises.note({"begun": uid})
                client.submit(rows(uid))
                self._promises.note({"accepted": uid})
                number += 1
                time.sleep(draw.uniform(0, 0.05))

    def _train(self) -> None:
        with TrainerClient(self._address, RUN, 0, dp_size=1, auto_commit=False, timeout_s=20) as trainer:
            trainer.load_state_dict({})
            for batch in trainer:
                for shard in batch.mini_batches():
                    shard.ack()
                    self._promises.note({"trained": sorted(uids_of(shard)), "state": trainer.state_dict()})
                for _ in range(CONFIG["train_batch_size"]):  # type: ignore[call-overload]
                    self._ahead.release()
                if batch.number % _COMMITS_EVERY == 0:
                    trainer.commit()

    def _churn(self) -> None:
        number = 0
        while not self._stopped.is_set():
            with RolloutClient(self._address, name := f"churn-{number}") as client:
                client.create_run(CONFIG)
                self._promises.note({"created": name})
                client.submit(rows("u"))
                time.sleep(0.2)
                self._promises.note({"deleting": name})
                client.delete_run()
                self._promises.note({"deleted": name})
            number += 1


def recorded(directory: Path, library: Path, fsync: Fsync, seed: int, seconds: float) -> list[Note]:
    """Runs a service under load. Returns what it did to its journal, and what it promised."""
    disk, shards, notes = directory / "disk", directory / "shards", directory / "notes"
    for path in (disk, shards):
        path.mkdir()
    command = [sys.executable, "-m", "tests.tools.power_loss.service", "small" if seed % 2 else "usual", "serve"]
    flags = ["--journal-dir", str(disk / "journal"), "--journal-fsync", fsync, "--shared-memory-dir", str(shards)]
    flags += ["--grpc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0"]
    announced = directory / "service.json"
    promises = Promises(notes)
    service = Service([*command, *flags, "--announce", str(announced)], announced, environment(library, disk, notes))
    try:
        Load(service.ready().grpc_address, promises, seed).run(seconds)
    except GristmillError as error:
        raise AssertionError(f"the load failed: {error}\n{service.log}") from error
    finally:
        service.close()
        promises.close()
    read = read_notes(notes)
    end = next(number for number, note in enumerate(read) if note.kind == b"p" and note.promise == "end")
    return read[:end]
