"""The plan's document, with its counts and metrics (specification, sections 3, 4, 6, 9, 10 and 12)."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from tests.reference_model import columns
from tests.reference_model import credit as credits
from tests.reference_model.scheduling import PADDING, MiniBatch, Ranks

if TYPE_CHECKING:
    from tests.reference_model.batch import Batch
    from tests.reference_model.rows import Group

Plan = dict[str, Any]


def places(micro_batches: list[list[int]]) -> list[list[int]]:
    """The places of each micro-batch's rows in their shard."""
    return [list(range(*pair)) for pair in pairwise([0, *accumulate(map(len, micro_batches))])]


def document(batch: Batch, number: int, shards: dict[Any, Any]) -> Plan:
    policy = [part for part in batch.parts if part.model == "policy"]
    dropped = [batch.groups[group] for part in policy for group in part.dropped]
    has_tags = any(group.tag for group in batch.groups)
    plan: Plan = {
        "batch": number,
        "rows_received": len(batch.received),
        "rows": len(batch.rows),
        "prompts": len(batch.groups),
        "optimizer_steps": len(policy) * batch.config["update_epochs_per_batch"],
        "dp_size": batch.config["dp_size"],
        "dropped_groups": [{"uid": group.uid, "round": group.round} for group in batch.stale + dropped],
        "mini_batches": [_mini_batch(batch, part) for part in batch.parts],
        "counts": batch.counts | _counts(batch, len(dropped)),
        "metrics": _accuracy(batch) | _load(batch, policy) | _padding(batch, policy, shards),
        "merge_mismatches": [
            {"uid": one.uid, "round": one.round, "sample": one.sample, **vars(found)}
            for one, every in zip(batch.trajectories, batch.mismatches, strict=True)
            for found in every[:3]
        ],
        "tags": [group.tag for group in batch.groups] if has_tags else [],
        "tag_metrics": {tag: _of_tag(batch, policy, tag) for tag in {group.tag for group in batch.groups} if has_tags},
    }
    if batch.baselines:
        plan["baselines"] = [
            {"tag": tag, "agent": agent, "before": batch.before.get((tag, agent), 0.0), "after": after}
            for (tag, agent), after in sorted(batch.baselines.items())
        ]
    return plan | ({"steps": [row.path for row in batch.rows]} if batch.config["merge"] == "tree" else {})


def _mini_batch(batch: Batch, part: MiniBatch) -> Plan:
    ranks = []
    for rank, micro_batches in enumerate(part.ranks):
        rows = [row for micro_batch in micro_batches for row in micro_batch]
        ranks.append({"rank": rank, "rows": rows, "micro_batches": places(micro_batches)})
        if batch.config["layout"] == "prefix_tree":
            ranks[-1]["shared"] = [count for rows in micro_batches for count in batch.shared(rows)]
    kept = batch.rows[part.start : part.kept_end]
    partitions = {"partitions": part.partitions} if any(batch.partitions) else {}
    return partitions | {
        "model": part.model,
        "index": part.index,
        "start": part.start,
        "end": part.end,
        "prompts": len(part.groups),
        "rows": len(kept),
        "padding_rows": _padding_rows(part.ranks),
        "loss_tokens": sum(sum(row.loss_mask) for row in kept),
        "micro_batches_per_rank": len(part.ranks[0]),
        "ranks": ranks,
    }


def _padding_rows(ranks: Ranks) -> int:
    return sum(row == PADDING for micro_batches in ranks for rows in micro_batches for row in rows)


def _counts(batch: Batch, dropped: int) -> dict[str, int]:
    config, sizes = batch.config, [len(group.trajectories) for group in batch.groups]
    n, estimator = config["n_samples_per_prompt"], config["advantage_estimator"]
    # A file does not say how many samples a group of its own size was to have; a service does.
    is_counted = config["max_samples_per_prompt"] is None or batch.announced is not None
    counts = {"misaligned_groups": dropped, "incomplete_groups": sum(size < n for size in sizes) if is_counted else 0}
    if n > 1:
        counts["lone_survivors"] = sum(size == 1 for size in sizes)
    if estimator == "maxrl" and sizes:
        members = credits.compared(batch.trajectories, config)
        sums = [sum(Fraction(batch.trajectories[one].score) for one in group) for group in members]
        counts["maxrl_nonpositive_groups"] = sum(total <= 0 for total in sums)
    if estimator in credits.PER_TOKEN:
        counts["uncredited_rewards"] = batch.credit.uncredited
    if config["tag_shares"]:
        tags = [group.tag for group in batch.groups]
        least = {tag: math.ceil(Fraction(str(share["min"])) * len(tags)) for tag, share in config["tag_shares"].items()}
        counts["tags_short"] = sum(tags.count(tag) < count for tag, count in least.items())
    if config["max_seq_len"] is not None:
        counts["rows_over_max_seq_len"] = sum(length > config["max_seq_len"] for length in batch.lengths)
    if any(column.get("merge") == "equal" for column in config["columns"]):
        counts["column_mismatches"] = sum(found.column != "" for every in batch.mismatches for found in every)
    return counts


def _accuracy(batch: Batch) -> Plan:
    """Each trajectory once, padding never."""
    if not batch.groups:
        return {}
    behind = [
        max(batch.current - version for version in one.versions()) for one in batch.trajectories if one.versions()
    ]
    staleness = {"staleness_mean": math.fsum(behind) / len(behind), "staleness_max": max(behind)} if behind else {}
    return _means(batch.groups) | staleness | _means_by_name(batch)


def _means_by_name(batch: Batch) -> Plan:
    """Scores by agent, components of rewards, and running baselines."""
    terms: dict[str, list[float]] = {}
    has_agents = any(one.steps[0]["agent"] for one in batch.trajectories)
    for one in batch.trajectories:
        if has_agents:
            terms.setdefault(f"agents/{one.steps[0]['agent'] or 'none'}/score_mean", []).append(one.score)
        for name, number in one.steps[-1].get("reward_components", {}).items():
            terms.setdefault(f"components/{name}/mean", []).append(float(number))
    for (tag, agent), after in batch.baselines.items():
        terms[f"baselines/{tag or 'none'}/{agent or 'none'}"] = [after]
    return {name: math.fsum(numbers) / len(numbers) for name, numbers in terms.items()}


def _means(groups: list[Group]) -> Plan:
    every = [one for group in groups for one in group.trajectories]
    rewards = [reward for one in every for step in one.steps for reward in credits.as_list(step["reward"])]
    return {
        "trajectories": len(every),
        "score_mean": math.fsum(one.score for one in every) / len(every),
        "reward_mean": math.fsum(rewards) / len(every),
        "pass_at_n": sum(any(one.score > 0 for one in group.trajectories) for group in groups) / len(groups),
        "response_length_mean": sum(len(step["response_ids"]) for one in every for step in one.steps) / len(every),
    }


def _kept(policy: list[MiniBatch]) -> list[int]:
    return [row for part in policy for row in range(part.start, part.kept_end)]


def _of_tag(batch: Batch, policy: list[MiniBatch], tag: str) -> Plan:
    groups = [group for group in batch.groups if group.tag == tag]
    rows = [row for row in _kept(policy) if batch.group(batch.rows[row]).tag == tag]
    tokens, padding = sum(batch.lengths[row] for row in rows), sum(batch.padding.get(row, 0) for row in rows)
    return _means(groups) | {
        "prompts": len(groups),
        "rows": len(rows),
        "tokens": tokens,
        "loss_tokens": sum(sum(batch.rows[row].loss_mask) for row in rows),
        "padding_tokens": padding,
        "padding_share": padding / (padding + tokens) if padding else 0.0,
    }


def _load(batch: Batch, policy: list[MiniBatch]) -> Plan:
    """What ranks wait for one another: over micro-steps, the slowest rank's load, by the ranks' mean."""
    flops = batch.config["flops"] or {"linear": 1.0, "quadratic": 0.0}
    multiple = batch.config["pad_rows_to_multiple_of"]

    def load(tokens: int) -> float:
        return float(flops.get("linear", 1.0) * tokens + flops.get("quadratic", 0.0) * tokens**2)

    def cost(row: int) -> float:
        named = [column for column in batch.config["columns"] if column["name"] == flops.get("column")]
        return sum(float(columns.value(batch.rows[row], column)) for column in named)

    slowest = mean = 0.0
    for part in policy:
        for step in zip(*part.ranks, strict=True):
            loads = [
                sum(load(batch.padded[row]) + cost(row) for row in rows if row != PADDING)
                - sum(load(count // multiple * multiple) for count in batch.shared(rows))
                for rows in step
            ]
            slowest, mean = slowest + max(loads), mean + sum(loads) / len(loads)
    return {
        "tokens": sum(batch.lengths[row] for row in _kept(policy)),
        "padding_rows": sum(_padding_rows(part.ranks) for part in policy),
        "barrier_ratio": slowest / mean if mean else 1.0,
    }


def _padding(batch: Batch, policy: list[MiniBatch], shards: dict[Any, Any]) -> Plan:
    distinct = sum(batch.lengths[row] for row in _kept(policy)) - sum(
        sum(batch.shared(rows)) for part in policy for micro_batches in part.ranks for rows in micro_batches
    )
    elements = sum(
        math.prod(shape)
        for (model, _, _), (tensors, _) in shards.items()
        for name, (_, shape, _) in tensors.items()
        if model == "policy" and name.endswith("sequences")
    )
    padding = elements - distinct
    metrics: Plan = {"padding_tokens": padding, "padding_share": padding / elements if elements else 0.0}
    if batch.config["cp_shards"] == "blocks":
        metrics["cp_barrier_ratio"] = _cp_barrier_ratio(shards, batch.config["cp_size"])
    return metrics | ({"distinct_tokens": distinct} if batch.config["layout"] == "prefix_tree" else {})


def _cp_barrier_ratio(shards: dict[Any, Any], cp_size: int) -> float:
    """The sum over micro-batches of the largest load of a context-parallel rank, by the sum of the ranks' means."""
    slowest = mean = 0.0
    for (model, _, _), (tensors, _) in shards.items():
        for name, (_, _, depths) in tensors.items():
            if model == "policy" and name.endswith("position_ids"):
                blocks = [sum(depths[at : at + 128]) + len(depths[at : at + 128]) for at in range(0, len(depths), 128)]
                ranks: list[list[int]] = [[] for _ in range(cp_size)]
                for block in sorted(blocks, reverse=True):
                    open_ranks = [rank for rank in ranks if len(rank) < math.ceil(len(blocks) / cp_size)]
                    min(open_ranks, key=sum).append(block)
                slowest, mean = slowest + max(map(sum, ranks)), mean + sum(blocks) / cp_size
    return slowest / mean if mean else 1.0
