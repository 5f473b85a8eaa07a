"""One image of a journal after a power loss: what the service makes of it, and what its users get."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from gristmill import RolloutClient, TrainerClient
from gristmill.errors import FailedPreconditionError
from gristmill_service.settings import Settings
from gristmill_service.storage.journal.run_log import Fsync
from tests.on_loop import Service
from tests.serving import FREE_PORTS
from tests.storage.dying_disk import Note
from tests.tools.power_loss.load import RUN, rows, uids_of

PROMISED_S: dict[Fsync, float] = {"always": 0.0, "interval": 1.0, "never": float("inf")}
"""The age up to which what was answered may be lost."""


@dataclass
class Promised:
    """What clients knew when the power failed.

    accepted: with the time. created, deleted: runs. checkpoints: with the uids that their weights have trained.
    """

    begun: set[str] = field(default_factory=set)
    accepted: dict[str, int] = field(default_factory=dict)
    created: set[str] = field(default_factory=set)
    deleted: set[str] = field(default_factory=set)
    checkpoints: list[tuple[int, dict[str, Any], list[str]]] = field(default_factory=list)

    def learn(self, note: Note) -> None:
        match note.promise:
            case {"begun": uid}:
                self.begun.add(uid)
            case {"accepted": uid}:
                self.accepted[uid] = note.at
            case {"created": name}:
                self.created.add(name)
            case {"deleting": name}:
                self.created.discard(name)
            case {"deleted": name}:
                self.deleted.add(name)
            case {"trained": uids, "state": state}:
                before = self.checkpoints[-1][2] if self.checkpoints else []
                self.checkpoints.append((note.at, state, [*before, *uids]))


@dataclass
class Findings:
    """Of one image or of many. oldest_loss_s: the age of the oldest answer that was lost."""

    images: int = 0
    batches_failed: int = 0
    trained_twice: int = 0
    lost_beyond: int = 0
    sampled_again: int = 0
    runs_wrong: int = 0
    same_generation: int = 0
    set_aside: int = 0
    oldest_loss_s: float = 0.0

    def add(self, other: Findings) -> None:
        for name, value in vars(other).items():
            one = getattr(self, name)
            setattr(self, name, max(one, value) if name == "oldest_loss_s" else one + value)

    @property
    def wrong(self) -> dict[str, int]:
        counted = {name: value for name, value in vars(self).items() if name not in ("images", "oldest_loss_s")}
        return {name: value for name, value in counted.items() if value}


class Image:
    """tolerance_s: by how much a busy machine may be late with its syncs."""

    def __init__(self, directory: Path, fsync: Fsync, promised: Promised, at: int, tolerance_s: float) -> None:
        self._promised, self._at, self._fsync = promised, at, fsync
        self._may_lose_s = PROMISED_S[fsync] + (tolerance_s if fsync == "interval" else 0.0)
        self.findings = Findings(images=1)
        (directory / "shards").mkdir()
        self._service = Service(
            Settings(
                **FREE_PORTS,
                journal_dir=directory / "journal",
                journal_fsync=fsync,
                shared_memory_dir=directory / "shards",
                shutdown_grace_s=5,
            )
        )

    def check(self) -> Findings:
        self._service.start()
        try:
            self._check_runs()
            self._client = RolloutClient(self._service.grpc_address, RUN, timeout_s=20)
            with self._client:
                try:
                    status = self._client.status()
                except FailedPreconditionError:
                    self.findings.set_aside += 1
                    self._client.delete_run()
                    return self.findings
                # What was promised may be missing, where anything was, for the machine was started again.
                may_be_short = self._fsync != "always" and bool(self._promised.accepted)
                self.findings.same_generation += may_be_short and status.generation == 1
                self._check_rest()
        finally:
            self._service.stop()
        return self.findings

    def _check_runs(self) -> None:
        names = {*httpx.get(f"{self._service.http_url}/v1/runs", trust_env=False).json()["runs"]}
        promised = self._promised
        self.findings.runs_wrong += len(promised.created - names) + len(promised.deleted & names)

    def _check_rest(self) -> None:
        promised = sorted(self._promised.begun | self._promised.accepted.keys())
        groups = {group.uid: group for group in self._client.groups(promised) if group.state != "unknown"}
        self._lose(at for uid, at in self._promised.accepted.items() if uid not in groups)
        trainer, trained = self._resumed()
        consumed = {uid for uid, group in groups.items() if group.is_consumed}
        self.findings.sampled_again += len({*trained} - consumed)
        # A data loader, which samples again what is missing, and goes on.
        uids = sorted((self._promised.begun | self._promised.accepted.keys()) - consumed)
        for uid in [*uids, "after-0", "after-1"]:
            self._client.submit(rows(uid))
        self._client.finish()
        with trainer:
            for batch in trainer:
                self._check_rows(trainer.rows(batch.number))
                for shard in batch.mini_batches():
                    trained += uids_of(shard)
                    shard.ack()
                trainer.commit()
        self.findings.trained_twice += sum(count - 1 for count in Counter(trained).values())
        self.findings.lost_beyond += len(self._promised.accepted.keys() - {*trained})
        status = self._client.status()
        self.findings.batches_failed += len(status.failed_batches) + len(status.groups_dropped)

    def _resumed(self) -> tuple[TrainerClient[Any], list[str]]:
        """Resumes from the newest checkpoint that fits. Returns the trainer, and what its weights have trained."""
        trainer = TrainerClient(self._service.grpc_address, RUN, 0, dp_size=1, auto_commit=False, timeout_s=20)
        for at, state, trained in reversed(self._promised.checkpoints):
            try:
                trainer.load_state_dict(state)
            except FailedPreconditionError:
                self._lose([at])
            else:
                return trainer, [*trained]
        trainer.load_state_dict({})
        assert trainer.position.batch == 0, "batches were committed that no checkpoint has"
        return trainer, []

    def _lose(self, times: Iterable[int]) -> None:
        for at in times:
            age = (self._at - at) / 1e9
            self.findings.oldest_loss_s = max(self.findings.oldest_loss_s, age)
            self.findings.lost_beyond += age > self._may_lose_s

    def _check_rows(self, stored: list[dict[str, Any]]) -> None:
        for row in stored:
            expected = rows(row["uid"])[row["sample"]]
            assert list(row["response_ids"]) == expected["response_ids"], row["uid"]
