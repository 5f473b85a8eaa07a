"""Models, ranks and places in the training order, as a person reads them."""

from __future__ import annotations

from gristmill.v1 import run_pb2


def model_name(number: int) -> str:
    """`policy` or `critic`."""
    return run_pb2.Model.Name(number).removeprefix("MODEL_").lower()  # type: ignore[arg-type]


def place(position: run_pb2.Position) -> str:
    epoch = f" epoch {position.epoch}" if position.epoch else ""
    return f"batch {position.batch}{epoch} mini-batch {position.mini_batch}"


def order(position: run_pb2.Position) -> tuple[int, int, int]:
    """Compares as the positions do."""
    return position.batch, position.epoch, position.mini_batch


def slowest(status: run_pb2.RunStatus) -> run_pb2.RankProgress | None:
    """The rank that the others wait for: the first of those that are furthest behind."""
    return min(status.ranks, key=lambda rank: order(rank.next), default=None)
