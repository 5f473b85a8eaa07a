"""How a run is, from what it says of itself: which of its parts waits for which, and whether it is stuck."""

from __future__ import annotations

from dataclasses import dataclass

from gristmill.v1 import run_pb2
from gristmill_service.cli.watch.snapshot import Look, RunLook


@dataclass(frozen=True, slots=True)
class Health:
    """state: one word or two. reason: what a person reads. is_stuck: it will not go on by itself."""

    state: str
    reason: str
    is_stuck: bool = False


def health(run: RunLook, before: RunLook | None = None, watched_s: float = 0.0) -> Health:
    """before: the run as it was `watched_s` ago; a run in which nothing moved since is stuck, unless it is done."""
    status = run.status
    if status is None:
        return Health("unreachable", run.trouble, is_stuck=True)
    if failed := _failed(status):
        return failed
    found = _activity(status)
    if before is None or found.state == "done" or before.status != status:
        return found
    return Health("stuck", f"nothing moved in {watched_s:.0f} s: {found.reason}", is_stuck=True)


def trouble(look: Look, healths: list[Health]) -> bool:
    """Whether there is something for a person to do."""
    return any(replica.trouble for replica in look.replicas) or any(health.is_stuck for health in healths)


def healths(look: Look, before: Look | None = None) -> list[Health]:
    """Of each run of the look, in its order."""
    earlier = {run.run: run for run in before.runs} if before else {}
    watched_s = look.at - before.at if before else 0.0
    return [health(run, earlier.get(run.run), watched_s) for run in look.runs]


def slowest(status: run_pb2.RunStatus) -> run_pb2.RankProgress | None:
    """The rank that the others wait for: the first of those that are furthest behind."""
    return min(status.ranks, key=lambda rank: _order(rank.next), default=None)


def place(position: run_pb2.Position) -> str:
    """As a person reads it."""
    epoch = f" epoch {position.epoch}" if position.epoch else ""
    return f"batch {position.batch}{epoch} mini-batch {position.mini_batch}"


def model_name(number: int) -> str:
    """`policy` or `critic`."""
    return run_pb2.Model.Name(number).removeprefix("MODEL_").lower()  # type: ignore[arg-type]


def is_done(status: run_pb2.RunStatus) -> bool:
    """Finished, and all of it is trained and committed."""
    waiting = status.groups_open + status.groups_complete
    return status.finished and not waiting and status.batches_freed == status.batches_sealed


def _failed(status: run_pb2.RunStatus) -> Health | None:
    """One that training has still before it: whoever asks for that batch gets an error."""
    committed = min((model.committed.batch for model in status.models), default=0)
    ahead = sorted(number for number in status.failed_batches if number >= committed)
    if not ahead:
        return None
    return Health("failed", f"batch {ahead[0]} could not be made: {status.failed_batches[ahead[0]]}", is_stuck=True)


def _activity(status: run_pb2.RunStatus) -> Health:
    held = status.batches_published - status.batches_freed
    if is_done(status):
        return Health("done", f"finished, {_batches(status.batches_freed)} trained")
    if status.batches_sealed > status.batches_published:
        return Health("making", f"batch {status.batches_published} is being made")
    if held and (status.groups_room == 0 or status.finished):
        return Health("training", f"producers wait for the trainer: {_batches(held)} not committed{_behind(status)}")
    if status.groups_open or status.groups_complete:
        return Health("collecting", f"{status.groups_open} groups are open, {status.groups_complete} complete")
    if held:
        return Health("training", f"{_batches(held)} not committed{_behind(status)}; no group is open")
    return Health("idle", "no group is open: no rollouts come")


def _batches(count: int) -> str:
    return f"{count} batch" if count == 1 else f"{count} batches"


def _behind(status: run_pb2.RunStatus) -> str:
    rank = slowest(status)
    return "" if rank is None else f", {model_name(rank.model)} rank {rank.rank} is at {place(rank.next)}"


def _order(position: run_pb2.Position) -> tuple[int, int, int]:
    return position.batch, position.epoch, position.mini_batch
