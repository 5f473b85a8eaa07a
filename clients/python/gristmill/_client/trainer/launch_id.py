"""One name for one start of a trainer, the same on all of its ranks, so that they resume as one."""

from __future__ import annotations

import secrets

import torch
from torch import distributed

from gristmill.errors import InvalidArgumentError

_BYTES = 16


def make_launch_id(dp_size: int) -> str:
    """A random name: rank 0's where torch.distributed is initialised, in a collective call that every process makes.

    Raises InvalidArgumentError where there are several ranks and no way to agree.
    """
    if distributed.is_available() and distributed.is_initialized():
        return _broadcast_id()
    if dp_size == 1:
        return secrets.token_hex(_BYTES)
    raise InvalidArgumentError(
        f"launch is not given, and dp_size is {dp_size} without torch.distributed; give a name that is the same on all "
        "ranks of this start and on no other (the job's id and restart count, for instance), or initialise "
        "torch.distributed first"
    )


def _broadcast_id() -> str:
    """As bytes: broadcast_object_list would unpickle them."""
    backend = distributed.get_backend()
    device = "cuda" if backend == "nccl" else "cpu"
    name = torch.tensor(list(secrets.token_bytes(_BYTES)), dtype=torch.uint8, device=device)
    distributed.broadcast(name, src=0)
    return bytes(name.tolist()).hex()
