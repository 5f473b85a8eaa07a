"""A shard's metadata stands beside its tensors in its file's header: JSON by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from gristmill._wire.columns import Int64s
from gristmill_service.config import RunConfig
from gristmill_service.pipeline.credit.advantage import Denominators
from gristmill_service.pipeline.layout.shard_address import ShardAddress
from gristmill_service.pipeline.scheduling.plan import RankPlan
from gristmill_service.pipeline.scored_batch import ScoredBatch

Labels = dict[str, NDArray[Any]]


def row_labels(scored: ScoredBatch) -> Labels:
    """Returns each row's uid, round and stop reason, its tag where any group has one, and, where tokens stand once for
    several rows, the length of its response, which no mask tells; the padding row's at the end; (rows + 1,) each."""
    received, rows = scored.received, scored.rows
    uids = [uid for _, uid in received.groups]
    # A group that was dropped is one of the batch too: who looks for it must not find padding.
    taken = {*uids, *(uid for _, uid in scored.stale)}
    groups = np.append(scored.row_groups, len(uids))
    lasts = np.append(rows.last, len(received.steps))
    lengths = {} if scored.sharing is None else {"response_lengths": np.append(rows.response_lengths, 0)}
    tags = {"tags": _objects([*received.tags, ""])[groups]} if any(received.tags) else {}
    return {
        "uids": _objects([*uids, _unused("padding", taken)])[groups],
        "rounds": np.array([*(round_ for round_, _ in received.groups), -1])[groups],
        "stop_reasons": _objects([*received.steps.stop_reasons, "padding"])[lasts],
        **tags,
        **lengths,
    }


class Metadata:
    """Makes the metadata of a model's shards. Per-row values are gathered for all at once: a shard's are a slice.

    placed: (n,) the rows of all shards one after another, -1 for padding rows. run, batch: of which they are.
    """

    def __init__(
        self,
        labels: Labels,
        denominators: Sequence[Denominators],
        placed: Int64s,
        config: RunConfig,
        run: str,
        batch: int,
    ) -> None:
        self._head = {"run": _json(run), "batch": _json(batch)}
        self._dp_size = _json(config.dp_size)
        self._labels = {name: values[placed].tolist() for name, values in labels.items()}
        self._tokens = {name: values[placed] for name, values in _tokens(denominators, len(labels["uids"])).items()}
        # Most shards of a batch have the same ones: their JSON by the bounds that they are of.
        self._micro_batches: dict[bytes, str] = {}

    def of(self, address: ShardAddress, rank: RankPlan, begin: int, denominators: Denominators) -> dict[str, str]:
        """Returns the metadata of a shard whose rows begin at `begin` of the placed ones."""
        rows = slice(begin, begin + len(rank.rows))
        tokens = {name: values[rows] for name, values in self._tokens.items()}
        return {
            **self._head,
            "model": _json(address.model),
            "mini_batch": _json(address.mini_batch),
            "rank": _json(address.rank),
            "dp_size": self._dp_size,
            **{name: _json(values[rows]) for name, values in self._labels.items()},
            "micro_batches": self._positions(rank),
            "loss_denominators": _json(denominators.totals | tokens),
        }

    def _positions(self, rank: RankPlan) -> str:
        key = rank.bounds.tobytes()
        if key not in self._micro_batches:
            self._micro_batches[key] = _json(rank.micro_batches)
        return self._micro_batches[key]


def _tokens(denominators: Sequence[Denominators], rows: int) -> dict[str, Int64s]:
    """Returns what each row's loss is divided by, as far as that is the row's own; 1 where it is in no mini-batch,
    and for the padding row at -1."""
    found = {name: np.ones(rows, np.int64) for name in ("row_tokens", "prompt_tokens", "trajectory_tokens")}
    for divisors in denominators:
        kept = slice(divisors.start, divisors.start + len(divisors.row_tokens))
        for name, values in found.items():
            values[kept] = getattr(divisors, name)
    return found


def _objects(values: Sequence[str]) -> NDArray[np.object_]:
    """Returns strings as an array, which rows index without a loop."""
    array = np.empty(len(values), np.object_)
    array[:] = values
    return array


def _unused(name: str, taken: set[str]) -> str:
    """Returns the name, with underscores before it until it is not taken."""
    while name in taken:
        name = f"_{name}"
    return name


def _json(value: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode()
