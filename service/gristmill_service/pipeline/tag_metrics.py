"""What a batch's groups of one environment or task (`tag`) are like, apart from the others'."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from gristmill._wire.columns import Int64s
from gristmill_service.config import RunConfig
from gristmill_service.pipeline.layout.shard import Shard
from gristmill_service.pipeline.scheduling.plan import MiniBatchPlan
from gristmill_service.pipeline.scored_batch import ScoredBatch

Figures = dict[str, int | float]


def tag_metrics(
    scored: ScoredBatch, policy: Sequence[MiniBatchPlan], laid_out: Sequence[Shard] | None
) -> dict[str, Figures]:
    """Returns the metrics of each tag, "" for groups without one; nothing where no group has one.

    Each trajectory counts once, rows and tokens as often as they are trained in an epoch. Padding rows are of no tag,
    so that `padding_tokens` is the padding in rows alone. laid_out: None when only planned.
    """
    received = scored.received
    if not any(received.tags):
        return {}
    names = sorted(set(received.tags))
    numbers = {name: number for number, name in enumerate(names)}
    of_group = np.array([numbers[tag] for tag in received.tags])
    found = _accuracy(scored, of_group, names)
    of_row = of_group[scored.row_groups]
    kept = np.zeros(len(scored.rows), np.bool_)
    for part in policy:
        kept[part.start : part.kept_end] = True
    tokens = np.bincount(of_row[kept], scored.rows.lengths[kept], len(names)).astype(np.int64)
    padding = None if laid_out is None else _padding(scored, policy, laid_out, of_row, len(names))
    for number, name in enumerate(names):
        own = kept & (of_row == number)
        found[name] |= {
            "rows": int(own.sum()),
            "tokens": int(tokens[number]),
            "loss_tokens": int(scored.loss_tokens[own].sum()),
        }
        if padding is not None:
            elements = int(padding[number] + tokens[number])
            found[name]["padding_tokens"] = int(padding[number])
            found[name]["padding_share"] = int(padding[number]) / elements if elements else 0.0
    return found


def tags_short(scored: ScoredBatch, config: RunConfig) -> int:
    """Counts the tags of which the batch has fewer groups than `tag_shares` asks for."""
    found = Counter(scored.received.tags)
    return sum(found[tag] < count for tag, count in config.tag_groups(len(scored.received.groups)).items())


def _accuracy(scored: ScoredBatch, of_group: Int64s, names: Sequence[str]) -> dict[str, Figures]:
    received, scores = scored.received, scored.scores
    of_trajectory = of_group[received.trajectory_groups]
    best = np.maximum.reduceat(scores, received.group_bounds[:-1])
    responses = np.add.reduceat(received.steps.response_lengths, received.trajectory_bounds[:-1])
    rewards = np.add.reduceat(received.steps.rewards, received.trajectory_bounds[:-1])
    found: dict[str, Figures] = {}
    for number, name in enumerate(names):
        own = of_trajectory == number
        found[name] = {
            "prompts": int((of_group == number).sum()),
            "trajectories": int(own.sum()),
            "score_mean": float(scores[own].mean()),
            "reward_mean": float(rewards[own].mean()),
            "pass_at_n": float((best[of_group == number] > 0).mean()),
            "response_length_mean": float(responses[own].mean()),
        }
    return found


def _padding(
    scored: ScoredBatch, policy: Sequence[MiniBatchPlan], laid_out: Sequence[Shard], of_row: Int64s, tags: int
) -> Int64s:
    """Returns the elements of `sequences` that are padding in rows of each tag."""
    placed = np.concatenate([rank.rows for part in policy for rank in part.ranks])
    blocks = [block for shard in laid_out if shard.address.model == "policy" for block in shard.blocks]
    real = placed >= 0
    widths = np.concatenate(
        [
            scored.rows.lengths[placed[block.begin : block.end]]
            if block.widths is None
            else np.full(block.end - block.begin, block.widths["sequence"])
            for block in blocks
        ]
    )[real]
    rows = placed[real]
    found: Int64s = np.bincount(of_row[rows], widths - scored.rows.lengths[rows], tags).astype(np.int64)
    return found
