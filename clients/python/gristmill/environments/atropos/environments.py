"""The environments that have registered, and what each is told about the queue before it. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec

from gristmill.errors import InvalidArgumentError, NotFoundError
from gristmill.v1 import run_pb2

_LEAST_WEIGHT = 0.01
_REMEMBERED = 65536
"""Groups, of which environment each was: more than any queue holds."""


class Registration(msgspec.Struct):
    """As `RegisterEnv` of `atroposlib/api/server.py`. desired_name: the environment's `wandb_name`."""

    max_token_length: int
    desired_name: str
    weight: float
    group_size: int
    min_batch_allocation: float | None = None


@dataclass(frozen=True)
class Run:
    """The part of a run that environments are told. config: its settings."""

    config: Mapping[str, Any]
    status: run_pb2.RunStatus

    @property
    def samples(self) -> int:
        return int(self.config["n_samples_per_prompt"])

    @property
    def largest_group(self) -> int:
        return int(self.config.get("max_samples_per_prompt") or self.samples)

    @property
    def batch_size(self) -> int:
        """In sequences, as Atropos counts."""
        return int(self.config["train_batch_size"]) * self.samples

    @property
    def shares(self) -> dict[str, float]:
        """The least share of each batch that an environment has, by its name."""
        return {name: share["min"] for name, share in (self.config.get("tag_shares") or {}).items()}

    @property
    def step(self) -> int:
        """Batches that every rank of the policy has trained."""
        ranks = [rank.next.batch for rank in self.status.ranks if rank.model == run_pb2.MODEL_POLICY]
        return min(ranks, default=0)

    @property
    def groups_waiting(self) -> int:
        """How many groups are complete and not trained yet."""
        sealed = self.status.batches_sealed - self.step
        return int(self.status.groups_complete) + sealed * int(self.config["train_batch_size"])


@dataclass
class Environment:
    """One process that has registered. name: with a number, so that each has its own."""

    registration: Registration
    name: str
    is_connected: bool = True

    @property
    def tag(self) -> str:
        return self.registration.desired_name

    @property
    def load(self) -> float:
        return self.registration.max_token_length * max(0.0, self.registration.weight)


@dataclass
class Environments:
    """All that have registered, by the number that each was given.

    sent: of which environment the last groups were, in the order in which the run took them.
    """

    known: list[Environment] = field(default_factory=list)
    sent: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def register(self, registration: Registration, run: Run) -> int:
        """Raises InvalidArgumentError where the run would not take what the environment makes."""
        name, size, share = registration.desired_name, registration.group_size, registration.min_batch_allocation
        if not 1 <= size <= run.largest_group:
            raise InvalidArgumentError(
                f"environment {name!r}: group_size is {size} and the run takes up to {run.largest_group} samples; set "
                "the environment's group_size, or create the run with max_samples_per_prompt"
            )
        if share is not None and run.shares.get(name, 0.0) < share:
            raise InvalidArgumentError(
                f"environment {name!r}: min_batch_allocation is {share} and the run keeps {run.shares.get(name, 0.0)} "
                f"of a batch for it; create the run with tag_shares: {{{name}: {{min: {share}}}}}"
            )
        number = sum(other.tag == name for other in self.known)
        self.known.append(Environment(registration, f"{name}_{number}"))
        return len(self.known) - 1

    def find(self, env_id: int | None) -> Environment:
        if env_id is None or not 0 <= env_id < len(self.known):
            raise NotFoundError(
                f"env_id is {env_id}, and {len(self.known)} environments have registered since this process was "
                "started; start the environment again"
            )
        return self.known[env_id]

    def status(self, env_id: int, run: Run) -> dict[str, Any]:
        """What an environment paces itself by: `queue_size` is in groups of its own size."""
        found = self.find(env_id)
        size = found.registration.group_size
        total = sum(env.load for env in self.known if env.is_connected)
        waiting = run.groups_waiting
        own = sum(number == env_id for number in islice(reversed(self.sent), waiting))
        return {
            "current_step": run.step,
            "queue_size": waiting * run.samples // size,
            "unallocated_fraction": 1.0 - min(1.0, sum(run.shares.values())),
            "self_queue_size": own,
            "max_group_size": max(env.registration.group_size for env in self.known),
            "env_weight": max(_LEAST_WEIGHT, found.load / total if total else 0.0),
        }
