"""Rows as they came, in the order of their batch (specification, sections 1, 2, 10), and which of them may train
(section 4, filters, and 12, versions)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.reference_model import credit

Row = dict[str, Any]
Config = dict[str, Any]

# fmt: off
DEFAULTS: Config = {
    "critic_mini_batch_size": None, "mini_batch_unit": "prompt", "update_epochs_per_batch": 1, "merge": "none",
    "retokenized_tail": 0, "trajectory_score": "last_step", "advantage_estimator": "grpo", "grpo_norm_by_std": True,
    "grpo_epsilon": 1e-6, "grpo_std_over": "group", "gamma": 1.0, "lambda": 1.0, "critic_lambda": None,
    "bootstrap": None, "rloo_norm_by_std": False, "loss_reduction_over": "all",
    "whiten": "none", "kl_in_reward": None, "kl_from": "old_logprobs",
    "loss_reduction": "none", "zero_variance_filter": None, "overlong_filter": [],
    "max_staleness": None, "stale": "count", "max_samples_per_prompt": None, "dp_size": 1, "cp_size": 1, "vpp_size": 1,
    "microbatch_group_size": 1, "on_misaligned": "pad", "balance": "none", "flops": None, "tag_shares": {},
    "layout": "left_padded", "pad_width": "shard", "pad_to_multiple_of": 1, "pad_token_id": 0, "max_seq_len": None,
    "pad_rows_to_multiple_of": 1, "pad_packed_to": [], "cp_shards": "none",
    "columns": [], "component_weights": {}, "length_penalty": None,
    "step_groups": None, "episode_agents": [], "rae": None, "token_step": False, "observation_weight": 0.0,
}
# fmt: on


@dataclass
class Trajectory:
    """One sample. steps: its rows, in order, with every optional field filled in. masks: of each step, its loss_mask
    after all filters. score: without a KL."""

    uid: str
    round: int
    sample: int
    steps: list[Row]
    masks: list[list[int]] = field(default_factory=list)
    score: float = 0.0

    def versions(self) -> list[int]:
        return [step["policy_version"] for step in self.steps if step["policy_version"] >= 0]


@dataclass
class Group:
    uid: str
    round: int
    tag: str
    trajectories: list[Trajectory]


def filled(row: Row) -> Row:
    """The row with the defaults of what it leaves out; its policy_version is the oldest of its policy_versions."""
    defaults: Row = {"round": 0, "step": 0, "is_last_step": True, "stop_reason": "", "policy_version": -1, "tag": ""}
    defaults |= {"step_key": "", "partition": "", "agent": "", "episode": ""}
    row = defaults | row
    if (versions := row.get("policy_versions")) is not None:
        row["policy_version"] = min((version for version in versions if version >= 0), default=-1)
    return row


def group_of(row: Row) -> tuple[int, str]:
    return row.get("round", 0), row["uid"]


def batches_of(rows: list[Row], config: Config) -> list[list[Row]]:
    """The rows of each batch of a file: every `train_batch_size` groups are one, by first appearance."""
    keys = list(dict.fromkeys(map(group_of, rows)))
    size = config["train_batch_size"]
    return [[row for row in rows if group_of(row) in keys[begin : begin + size]] for begin in range(0, len(keys), size)]


def groups_of(rows: list[Row]) -> list[Group]:
    """Groups by first appearance, their samples and steps by number."""
    groups: dict[tuple[int, str], dict[int, list[Row]]] = {}
    for row in map(filled, rows):
        groups.setdefault(group_of(row), {}).setdefault(row["sample"], []).append(row)
    return [
        Group(
            uid,
            round_,
            next((row["tag"] for steps in samples.values() for row in steps if row["tag"]), ""),
            [
                Trajectory(uid, round_, sample, sorted(samples[sample], key=lambda row: int(row["step"])))
                for sample in sorted(samples)
            ],
        )
        for (round_, uid), samples in groups.items()
    ]


def filtered(
    groups: list[Group], config: Config, announced: int | None
) -> tuple[list[Group], list[Group], dict[str, int], int]:
    """The groups that stay, with scores and masks; those dropped as stale; the counts; the current version,
    which without an announced one is the largest in the batch."""
    counts: dict[str, int] = {}
    steps = [step for group in groups for one in group.trajectories for step in one.steps]
    seen = [version for step in steps for version in [step["policy_version"], *(step.get("policy_versions") or [])]]
    current = max(seen, default=-1) if announced is None else announced
    most, dropped = config["max_staleness"], list[Group]()
    if most is not None:
        stale = [
            group
            for group in groups
            if any(current - version > most for one in group.trajectories for version in one.versions())
        ]
        counts["stale_groups"] = len(stale)
        if config["stale"] == "drop":
            dropped = stale
            groups = [group for group in groups if group not in stale]
    has_versions = any(step.get("policy_versions") is not None for step in steps)
    for group in groups:
        for one in group.trajectories:
            one.masks = [list(step["loss_mask"]) for step in one.steps]
            one.score = credit.score(one.steps, config)
    if config["stale"] == "mask":
        counts["stale_tokens"] = sum(
            _mask_stale(one, most, current, has_versions) for group in groups for one in group.trajectories
        )
    return groups, dropped, counts, current


def _mask_stale(one: Trajectory, most: int | None, current: int, has_versions: bool) -> int:
    """Masks tokens that are too far behind. Returns how many of them had loss_mask 1."""
    masked = 0
    if most is None:
        return 0
    for step, mask in zip(one.steps, one.masks, strict=True):
        given = step.get("policy_versions")
        versions = given if given is not None else [step["policy_version"]] * len(mask)
        for at, version in enumerate(versions):
            if version >= 0 and current - version > most:
                masked += mask[at]
                mask[at] = 0
    return masked


def mask_steps(groups: list[Group], config: Config) -> dict[str, int]:
    """Masks overlong steps and groups of equal scores."""
    counts: dict[str, int] = {}
    reasons, overlong, equal = config["overlong_filter"], 0, 0
    every = [one for group in groups for one in group.trajectories]
    for members in credit.compared(every, config):
        is_equal = credit.all_equal([every[place].score for place in members])
        equal += is_equal
        for one in (every[place] for place in members):
            for number, step in enumerate(one.steps):
                is_overlong = {step["stop_reason"], one.steps[-1]["stop_reason"]} & set(reasons) != set()
                overlong += is_overlong
                if is_overlong or (is_equal and config["zero_variance_filter"] == "mask"):
                    one.masks[number] = [0] * len(one.masks[number])
    if reasons:
        counts["overlong_steps"] = overlong
    if config["zero_variance_filter"] == "mask":
        counts["zero_variance_groups"] = equal
    return counts
