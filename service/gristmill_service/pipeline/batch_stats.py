"""Statistics count what became of a batch's rows and tokens. Nothing of them goes into plan or shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gristmill._wire.columns import Int64s
from gristmill_service.config import RunConfig
from gristmill_service.pipeline.group_counts import GroupCounts, group_counts
from gristmill_service.pipeline.layout.shard import Shard
from gristmill_service.pipeline.rows.joins import Mismatch, breaks
from gristmill_service.pipeline.scheduling.plan import MiniBatchPlan
from gristmill_service.pipeline.scored_batch import ScoredBatch
from gristmill_service.pipeline.tag_metrics import Figures, tag_metrics

ROW_KINDS = ("submitted", "merged", "trained", "padding")
TOKEN_KINDS = (*ROW_KINDS, "loss", "realigned", "distinct")
CAUSES = ("prompt", "response", "truncated", "column", "further")
LEVELS = ("laid_out", "packed", "micro_batch", "shard", "mini_batch", "batch")


@dataclass(frozen=True, slots=True)
class BatchStats:
    """Counts of the policy's mini-batches, each row once whatever the epochs.

    rows, tokens: by kind. `submitted` is what came in, `merged` what went into other rows, `trained` what is trained
        on, `loss` its tokens with loss_mask 1, `padding` what fills up, `realigned` what was sampled and stands in no
        row, since a prompt has other tokens in its place; `distinct` what of `trained` is laid out, where rows share
        tokens less than all.
    dropped_rows, dropped_tokens: by reason, stale or misaligned; what alignment drops is counted as merged rows.
    mismatches: by cause; see `_causes`.
    column_bytes: of the shards of all models, by declared column.
    padding: the share of elements that is padding, as it is laid out, and as `packed` and each `pad_width` would have
        it.
    staleness: of each trajectory with a known policy version, how many versions it is behind.
    tags: figures of each tag that groups have, as in the plan.
    groups: what groups scored, by tag, "" for those without one.
    """

    rows: dict[str, int]
    tokens: dict[str, int]
    dropped_rows: dict[str, int]
    dropped_tokens: dict[str, int]
    mismatches: dict[str, int]
    column_bytes: dict[str, int]
    padding: dict[str, float]
    staleness: Int64s
    tags: dict[str, Figures] = field(default_factory=dict)
    groups: dict[str, GroupCounts] = field(default_factory=dict)


def collect_stats(
    scored: ScoredBatch,
    mini_batches: Sequence[MiniBatchPlan],
    laid_out: Sequence[Shard],
    config: RunConfig,
    tokens_submitted: int,
) -> BatchStats:
    """Counts a batch. tokens_submitted: prompt and response tokens of all rows as they came, also of stale groups."""
    policy = [part for part in mini_batches if part.model == "policy"]
    steps, rows = scored.received.steps, scored.rows
    elements = sum(shard.sequence_elements for shard in laid_out if shard.address.model == "policy")
    fresh, merged = steps.tokens.total, int(rows.lengths.sum())
    trained = sum(int(rows.lengths[part.start : part.kept_end].sum()) for part in policy)
    trained_rows = sum(part.rows for part in policy)
    distinct = trained - (0 if scored.sharing is None else scored.sharing.shared_tokens(policy))
    return BatchStats(
        rows={
            "submitted": scored.rows_received,
            "merged": len(steps) - len(rows),
            "trained": trained_rows,
            "padding": sum(part.padding_rows for part in policy),
        },
        tokens={
            "submitted": tokens_submitted,
            "merged": fresh - merged,
            "trained": trained,
            "padding": elements - distinct,
            "realigned": scored.counts.get("realigned_tokens", 0),
            "distinct": distinct,
            "loss": sum(int(scored.loss_tokens[part.start : part.kept_end].sum()) for part in policy),
        },
        dropped_rows={"stale": scored.rows_received - len(steps), "misaligned": len(rows) - trained_rows},
        dropped_tokens={"stale": tokens_submitted - fresh, "misaligned": merged - trained},
        mismatches=_causes(scored, config),
        column_bytes=dict(sum((Counter(shard.column_bytes) for shard in laid_out), Counter())),
        padding=_padding(scored, policy, config, trained, 1 - distinct / elements) if elements else {},
        staleness=scored.staleness,
        tags=tag_metrics(scored, policy, laid_out),
        groups=group_counts(scored),
    )


def _causes(scored: ScoredBatch, config: RunConfig) -> dict[str, int]:
    """Counts why steps joined none: where the first token that differs stands in the one that they are held against,
    in its prompt or its response, or that the new prompt merely ends too early. The first few of a trajectory are
    looked at; `further` are the others."""
    if not config.merging.joins:
        return {}
    found = Counter(_cause(scored, mismatch) for mismatch in scored.mismatches)
    in_all = len(breaks(scored.received, scored.rows.first))
    return {**found, "further": in_all - found.total()}


def _cause(scored: ScoredBatch, mismatch: Mismatch) -> str:
    if mismatch.column:
        return "column"
    first = int(scored.received.trajectory_bounds[mismatch.trajectory])
    prompts = scored.received.steps.prompt_lengths
    if mismatch.index >= prompts[first + mismatch.step]:
        return "truncated"
    return "prompt" if mismatch.index < prompts[first + mismatch.before] else "response"


def _padding(
    scored: ScoredBatch, policy: Sequence[MiniBatchPlan], config: RunConfig, trained: int, laid_out: float
) -> dict[str, float]:
    lengths = np.append(scored.rows.lengths, config.padding_row_tokens)
    ranks = [rank for part in policy for rank in part.ranks]
    placed = lengths[np.concatenate([rank.rows for rank in ranks])]
    begins = np.cumsum([0, *(len(rank.rows) for rank in ranks)])
    edges = {
        "micro_batch": np.concatenate([begin + rank.bounds[:-1] for begin, rank in zip(begins, ranks, strict=False)]),
        "shard": begins[:-1],
        "mini_batch": begins[: -1 : len(policy[0].ranks)],
        "batch": begins[:1],
    }
    sizes = {level: _elements(placed, edge, config.pad_to_multiple_of) for level, edge in edges.items()}
    shares = {level: 1 - trained / size for level, size in [("packed", int(placed.sum())), *sizes.items()]}
    return {"laid_out": laid_out, **shares}


def _elements(lengths: Int64s, begins: Int64s, multiple: int) -> int:
    """Counts the elements of rows in blocks, each as wide as its longest row."""
    widths = -(-np.maximum.reduceat(lengths, begins) // multiple) * multiple
    return int((widths * np.diff(np.append(begins, len(lengths)))).sum())
