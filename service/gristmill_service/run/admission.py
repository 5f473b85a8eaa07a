"""How many prompt groups may be admitted, and why no more: what paces producers."""

from __future__ import annotations

from typing import NamedTuple

from gristmill_service.config import RunConfig
from gristmill_service.run.state import State

RETRY_AFTER_S = 0.5


class Room(NamedTuple):
    groups: int
    reason: str
    """What sets the limit, for a person who is refused."""


def room(state: State, config: RunConfig, max_bytes: int) -> Room:
    """Groups that may be admitted now. max_bytes: what rows and shards of the run may hold."""
    bounds = [_by_batches(state, config), _by_bytes(state, max_bytes)]
    unsealed = len(state.open)
    if unsealed < config.train_batch_size and not state.batches:
        # Nothing is held that could be freed: without these groups the next batch could never be filled.
        bounds = [Room(max(bound.groups, config.train_batch_size - unsealed), bound.reason) for bound in bounds]
    if config.max_staleness is not None:
        bounds.append(_by_staleness(state, config, config.max_staleness))
    least = min(bounds)
    return Room(max(0, least.groups), least.reason)


def _by_batches(state: State, config: RunConfig) -> Room:
    held = len(state.open) + state.groups_buffered
    return Room(
        config.max_buffered_batches * config.train_batch_size - held,
        f"max_buffered_batches: {config.max_buffered_batches} batches of train_batch_size: {config.train_batch_size} "
        "are held; the trainer has to commit one, or raise the setting",
    )


def _by_bytes(state: State, max_bytes: int) -> Room:
    mean = state.completed_bytes / state.completions if state.completions else 0.0
    reserved = mean * (len(state.open) - len(state.complete))
    free = max_bytes - state.row_bytes - state.shard_bytes - reserved
    groups = int(free // mean) if mean else (1 << 31 if free > 0 else 0)
    return Room(
        groups,
        f"{state.row_bytes + state.shard_bytes} bytes are held and {int(reserved)} reserved of max_buffered_bytes: "
        f"{max_bytes}; the trainer has to commit a batch, or raise the setting",
    )


def _by_staleness(state: State, config: RunConfig, max_staleness: int) -> Room:
    """What is accepted plus running stays within (max_staleness + version + 1) batches (AReaL, Fu et al. 2025)."""
    batches = max_staleness + state.policy_version + 1
    return Room(
        batches * config.train_batch_size - len(state.open) - state.groups_sealed,
        f"max_staleness: {max_staleness} at policy version {state.policy_version} allows {batches} batches in all; the "
        "trainer has to announce a newer version",
    )
