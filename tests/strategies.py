"""Hypothesis strategies: batches of rollouts with turns that extend each other, break the prefix, go on from an earlier
turn, or come back retokenized at the end."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from gristmill._wire.column_spec import DTYPES, ColumnSpec, specs_of
from gristmill_service.config import MERGE_MODES

Row = dict[str, Any]

# Of laws that make rollouts: few examples each time, and many where `make test-laws` asks for them.
LAW = settings(
    deadline=None,
    max_examples=int(os.environ.get("LAW_EXAMPLES", "50")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

TOKENS = st.integers(0, 9)
SCORES = st.sampled_from([0.0, 1.0, 0.7, -0.5, 0.1])


@st.composite
def trajectories(
    draw: st.DrawFn, uid: str, sample: int, *, max_steps: int, logprobs: bool, token_rewards: bool
) -> list[Row]:
    """One trajectory's rows in step order; each next prompt extends the sequence before, an earlier one, or none."""
    rows: list[Row] = []
    sequence = draw(st.lists(TOKENS, min_size=1, max_size=5))
    count = draw(st.integers(1, max_steps))
    for step in range(count):
        response = draw(st.lists(TOKENS, min_size=1, max_size=5))
        row: Row = {
            "uid": uid,
            "sample": sample,
            "step": step,
            "is_last_step": step == count - 1,
            "prompt_token_ids": sequence,
            "response_ids": response,
            "loss_mask": draw(st.lists(st.integers(0, 1), min_size=len(response), max_size=len(response))),
            "reward": draw(
                st.lists(SCORES, min_size=len(response), max_size=len(response)) if token_rewards else SCORES
            ),
            "stop_reason": draw(st.sampled_from(["stop", "length", "tool_calls"])),
            "policy_version": draw(st.integers(-1, 3)),
        }
        if logprobs:
            row["rollout_logprobs"] = [-(10.0 * step + index + 1.0) for index in range(len(response))]
        rows.append(row)
        sequence = draw(next_prompts(rows))
    return rows


@st.composite
def next_prompts(draw: st.DrawFn, rows: list[Row]) -> list[int]:
    """A prompt behind these steps: mostly the last one's sequence and an observation."""
    sequences: list[list[int]] = [row["prompt_token_ids"] + row["response_ids"] for row in rows]
    before, observation = sequences[-1], draw(st.lists(TOKENS, max_size=3))
    match draw(st.sampled_from(["extends", "extends", "extends", "breaks", "forks", "retokenized"])):
        case "extends":
            return before + observation
        case "breaks":
            return (before + observation)[1:] or [1]
        case "forks":
            return draw(st.sampled_from(sequences)) + observation
        case _:
            source = draw(st.sampled_from(sequences))
            return source[: max(1, len(source) - draw(st.integers(1, 6)))] + observation


@st.composite
def rollouts(
    draw: st.DrawFn,
    *,
    most_prompts: int = 5,
    samples: int = 3,
    max_steps: int = 4,
    whole_groups: bool = False,
) -> list[Row]:
    """A batch's rows in the order of the specification: groups, samples, steps."""
    logprobs, token_rewards = draw(st.booleans()), draw(st.booleans())
    rows: list[Row] = []
    for prompt in range(draw(st.integers(1, most_prompts))):
        present = range(samples) if whole_groups else sorted(draw(st.sets(st.integers(0, samples - 1), min_size=1)))
        for sample in present:
            rows += draw(
                trajectories(f"p{prompt}", sample, max_steps=max_steps, logprobs=logprobs, token_rewards=token_rewards)
            )
    return rows


@st.composite
def settings_for(draw: st.DrawFn, /, rows: list[Row], *, samples: int = 3, **fixed: Any) -> dict[str, Any]:
    """A configuration that accepts the rows: one batch of them, and the rest drawn."""
    groups = len({row["uid"] for row in rows})
    sizes = [size for size in range(1, groups + 1) if groups % size == 0]
    config: dict[str, Any] = {
        "train_batch_size": groups,
        "n_samples_per_prompt": samples,
        "policy_mini_batch_size": draw(st.sampled_from(sizes)),
        "step_wise": True,
        "merge": draw(st.sampled_from(list(MERGE_MODES))),
        "trajectory_score": draw(st.sampled_from(["last_step", "sum"])),
        "advantage_estimator": draw(st.sampled_from(["grpo", "rloo", "maxrl", "opo", "passk"])),
        "grpo_std_over": draw(st.sampled_from(["group", "batch"])),
        "grpo_norm_by_std": draw(st.booleans()),
        "grpo_epsilon": draw(st.sampled_from([1e-6, 1e-4, 0.5])),
        "loss_reduction": draw(
            st.sampled_from(
                [
                    "none",
                    "token_mean",
                    "sequence_mean",
                    "seq_mean_token_sum_norm",
                    "prompt_mean",
                    "trajectory_mean",
                ]
            )
        ),
        "max_seq_len": 16,
        "dp_size": draw(st.integers(1, 5)),
        "micro_batch": draw(
            st.one_of(
                st.builds(lambda size, full: {"size": size, "full": full}, st.integers(1, 4), st.booleans()),
                st.builds(lambda tokens: {"max_tokens": tokens}, st.integers(1, 40)),
                st.builds(lambda count: {"count": 6 * count}, st.integers(1, 2)),
            )
        ),
        "layout": draw(st.sampled_from(["left_padded", "packed"])),
        "pad_width": draw(st.sampled_from(["batch", "mini_batch", "shard", "micro_batch"])),
        "pad_to_multiple_of": draw(st.sampled_from([1, 4])),
        "pad_token_id": draw(st.sampled_from([0, 77])),
    }
    if draw(st.booleans()):
        config["critic_mini_batch_size"] = draw(st.sampled_from(sizes))
    if draw(st.booleans()):
        config |= {"vpp_size": 2, "microbatch_group_size": draw(st.integers(1, 3))}
    config |= fixed
    if config["layout"] != "left_padded":
        config = {"pad_rows_to_multiple_of": draw(st.sampled_from([1, 1, 4]))} | config
    if config["merge"] != "none" and "retokenized_tail" not in fixed:
        config["retokenized_tail"] = draw(st.sampled_from([0, 0, 1, 3, 2**63 - 1]))
    return config


def batches_and_settings(**fixed: Any) -> st.SearchStrategy[tuple[list[Row], dict[str, Any]]]:
    return rollouts().flatmap(lambda rows: st.tuples(st.just(rows), settings_for(rows, **fixed)))


_COLUMN_MERGES = {
    "row": ["last", "first", "sum"],
    "response": [""],
    "token": ["first", "last"],
    "items": ["last", "concat"],
}


@st.composite
def declared_columns(draw: st.DrawFn) -> list[dict[str, Any]]:
    columns = []
    for number in range(draw(st.integers(1, 4))):
        scope = draw(st.sampled_from(list(_COLUMN_MERGES)))
        dtype = draw(st.sampled_from(DTYPES))
        merge = draw(st.sampled_from(_COLUMN_MERGES[scope]))
        columns.append(
            {
                "name": f"column_{number}",
                "dtype": dtype,
                "scope": scope,
                "shape": draw(st.sampled_from([[], [2], [2, 3]])),
                "fill": draw(st.sampled_from([0, 1])),
                "required": draw(st.booleans()),
                "partial": scope in ("token", "response") and draw(st.booleans()),
            }
            | ({"merge": "last"} if merge == "sum" and dtype == "bool" else {"merge": merge} if merge else {})
            | ({"shape": [None], "fill": 0} if scope in ("token", "response") and draw(st.integers(0, 3)) == 0 else {})
        )
    return columns


def _with_columns(draw: st.DrawFn, rows: list[Row], specs: tuple[ColumnSpec, ...]) -> list[Row]:
    """The rows with values of the columns, small integers that every type holds."""
    extended = []
    for row in rows:
        tokens, response = len(row["prompt_token_ids"]) + len(row["response_ids"]), len(row["response_ids"])
        row = dict(row)
        for spec in specs:
            if not spec.required and draw(st.integers(0, 3)) == 0:
                continue
            count = {"row": 1, "response": response, "token": tokens}.get(spec.scope, draw(st.integers(0, 3)))
            values = draw(st.integers(0, 100)) + np.arange(count * int(np.prod(spec.value_shape))).reshape(
                count, *spec.value_shape
            )
            values = values % (2 if spec.dtype == "bool" else 100)
            row[spec.name] = (values[0] if spec.scope == "row" else values).tolist()
            if spec.is_ragged:
                row[spec.name] = [[one] * draw(st.integers(0, 2)) for one in row[spec.name]]
            if spec.partial:
                # Often all but the last, as engines give routes.
                start, end = draw(st.sampled_from([(0, count - 1), (0, count), (count, count), (1, count)]))
                row[spec.name] = row[spec.name][start:end]
                if start or draw(st.booleans()):
                    row[f"{spec.name}_start"] = start
        extended.append(row)
    return extended


@st.composite
def batches_with_columns(draw: st.DrawFn, /, **fixed: Any) -> tuple[list[Row], dict[str, Any]]:
    """Rows with values of columns that the configuration declares."""
    columns = draw(declared_columns())
    rows = _with_columns(draw, draw(rollouts(most_prompts=3)), specs_of(columns))
    return rows, draw(settings_for(rows, **fixed)) | {"columns": columns}
