"""Converts slime's samples to rows (`Sample` of slime/utils/types.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gristmill._converters.keys import Choice, Keys, Row
from gristmill._converters.refusals import refusing
from gristmill._converters.rows import as_steps, tagged
from gristmill._converters.values import array_of, attribute, attributes, routes, uid_of, unpacked, version_of
from gristmill.errors import InvalidArgumentError

_WHAT = "slime samples"
_IMAGES = "multimodal_train_inputs"
_ROUTES = "rollout_routed_experts"
_MASK, _MASK_OFFSETS = "rollout_top_p_token_ids", "rollout_top_p_token_offsets"
_TOP_IDS, _TOP_LOGPROBS = "rollout_topk_token_ids", "rollout_topk_log_probs"
# Their samples have no reward, unless they were scored all the same.
_ABORTED = ("aborted", "failed")
# Maps values of `status` to SGLang's stop reasons. "pending" is absent: such a sample was not sampled yet.
_STOP_REASONS = {"completed": "stop", "truncated": "length", "aborted": "abort", "failed": "failed"}
_KEYS = Keys(
    _WHAT,
    frozenset(
        {
            *("group_index", "index", "rollout_id", "tokens", "response_length", "loss_mask", "remove_sample"),
            *("reward", "rollout_log_probs", "status", "weight_versions"),
        }
    ),
    ignored={
        "prompt": "text; the sample has its tokens",
        "response": "text; the sample has its tokens",
        "label": "input of the reward model",
        "metadata": "an entry of the data set",
        "multimodal_inputs": "images before the processor",
        "multimodal_train_input_id": "where images are stored temporarily",
        "apply_chat_template_kwargs": "how the prompt was built",
        "generate_function_path": "how it was sampled",
        "custom_rm_path": "how it was scored",
        "session_id": "which engine sampled it",
        "non_generation_time": "a metric",
        "spec_info": "a metric",
        "prefix_cache_info": "a metric",
    },
    needed={
        "teacher_log_probs": "the teacher's logprobs",
        _ROUTES: "the routed experts of every token",
        _MASK: "the tokens that top-p kept",
        _MASK_OFFSETS: f"the start of each token's entries in {_MASK}",
        _TOP_IDS: "the engine's most likely tokens, for score centering",
        _TOP_LOGPROBS: f"the logprobs of {_TOP_IDS}",
        "train_metadata": "the loss function's arguments for the sample",
    },
)


@refusing(_WHAT)
def from_slime(
    samples: Iterable[Any],
    *,
    reward_key: str | None = None,
    tags: Sequence[str | None] | None = None,
    round: int = 0,
    attempt: int = 0,
    policy_version: int | None = None,
    columns: Iterable[str] = (),
    ignore: Iterable[str] = (),
) -> list[Row]:
    """Convert slime's `Sample`s to rows.

    Samples with the same `group_index` are a group, numbered in the order of `rollout_id`, or `index` if that is None.
    Samples of one rollout become its steps, in their order, and must have the same reward. The last `response_length`
    of `tokens` are the response. Without a `loss_mask`, every token of the response is trained; with `remove_sample`,
    none is. The stop reason follows from `status`: stop, length, abort or failed. A reward of None is pending; of a
    sample that was aborted or failed, no reward comes, so its row says `aborted` in place of what was sampled: `submit`
    aborts the trajectory, and the group goes on without it.
    `weight_versions` has one entry per call of the engine. If the response has the same number of segments with
    `loss_mask` 1, each segment gets one of the versions; otherwise all tokens get the oldest version.

    samples: a list, or nested lists, as `generate_rollout` returns them.
    reward_key: the reward to use if rewards are mappings (slime's `--reward-key`).
    tags: one per sample, for example from the data set's `metadata`.
    columns: for example `teacher_log_probs`, or names within `multimodal_train_inputs`. The offsets of
        `rollout_top_p_token_ids`, a column of scope `response` and shape `[null]`, are added automatically.

        output = generate_rollout(args, rollout_id, data_source)
        client.submit(from_slime(output.samples))
    """
    choice = Choice.of(columns, ignore)
    flat = list(_flat(samples))
    numbers = _sample_numbers(flat)
    present = [_present(sample, choice) for sample in flat]
    taken = {_MASK_OFFSETS} if _MASK in choice.columns else set()
    _KEYS.check({name for values in present for name in values} - taken, choice)
    rows, tag_fields = [], tagged(tags, len(flat), _WHAT)
    for position, sample in enumerate(flat):
        uid = uid_of(attribute(sample, "group_index"), f"{_WHAT}: sample {position}")
        where = f"{_WHAT}: sample {position} (uid {uid!r} index {attribute(sample, 'index')})"
        names = {"uid": uid, "round": round, "sample": numbers[position], "attempt": attempt, **tag_fields[position]}
        reward, status = _reward(attribute(sample, "reward"), reward_key, where), _status(sample, where)
        if reward is None and status in _ABORTED:
            rows.append({**names, "reward": None, "aborted": status})
            continue
        fields = _fields(sample, where)
        rows.append(
            {
                **names,
                **fields,
                "reward": reward,
                "stop_reason": _STOP_REASONS[status],
                **(_versions(sample, fields) if policy_version is None else {"policy_version": policy_version}),
                **_columns(present[position], choice, where),
            }
        )
    return _with_aborts(as_steps(rows))


def _with_aborts(rows: list[Row]) -> list[Row]:
    """Replace the rows of a trajectory of which a sample was aborted by one that says so."""
    aborted: dict[tuple[str, int], Row] = {}
    for row in rows:
        if "aborted" in row:
            names = ("uid", "round", "sample", "attempt", "tag", "aborted")
            aborted[row["uid"], row["sample"]] = {name: row[name] for name in names if name in row}
    return [*(row for row in rows if (row["uid"], row["sample"]) not in aborted), *aborted.values()]


def _flat(samples: Iterable[Any]) -> Iterator[Any]:
    for sample in samples:
        if isinstance(sample, (list, tuple)):
            yield from _flat(sample)
        else:
            yield sample


def _sample_numbers(samples: list[Any]) -> list[int]:
    """Return the number of each sample's rollout within its group."""
    rollouts: dict[Any, set[int]] = {}
    keys = []
    for position, sample in enumerate(samples):
        group, rollout = attribute(sample, "group_index"), _rollout(sample)
        if group is None or rollout is None:
            missing = "group_index" if group is None else "index"
            raise InvalidArgumentError(
                f"{_WHAT}: sample {position} has no {missing}, which identifies its group and sample; set it"
            )
        rollouts.setdefault(group, set()).add(rollout)
        keys.append((group, rollout))
    order = {
        group: {rollout: number for number, rollout in enumerate(sorted(of_group))}
        for group, of_group in rollouts.items()
    }
    return [order[group][rollout] for group, rollout in keys]


def _rollout(sample: Any) -> Any:
    rollout = attribute(sample, "rollout_id")
    return attribute(sample, "index") if rollout is None else rollout


def _fields(sample: Any, where: str) -> Row:
    tokens = array_of(attribute(sample, "tokens"), "tokens", where)
    length = int(attribute(sample, "response_length", 0))
    if not 0 < length < len(tokens):
        raise InvalidArgumentError(
            f"{where}: response_length is {length} of {len(tokens)} tokens; pass a prompt and a response"
        )
    mask = attribute(sample, "loss_mask")
    fields = {
        "prompt_token_ids": tokens[:-length],
        "response_ids": tokens[-length:],
        "loss_mask": np.ones(length, np.uint8) if mask is None else array_of(mask, "loss_mask", where),
    }
    if attribute(sample, "remove_sample"):
        fields["loss_mask"] = np.zeros(length, np.uint8)
    logprobs = attribute(sample, "rollout_log_probs")
    return fields if logprobs is None else fields | {"rollout_logprobs": array_of(logprobs, "rollout_log_probs", where)}


def _reward(reward: Any, key: str | None, where: str) -> Any:
    if not isinstance(reward, Mapping):
        return reward
    if key is None or key not in reward:
        known = ", ".join(map(repr, reward))
        raise InvalidArgumentError(f"{where}: reward has {known}, and reward_key is {key!r}; set one of these keys")
    return reward[key]


def _status(sample: Any, where: str) -> str:
    status = attribute(sample, "status")
    value: str = getattr(status, "value", status)
    if value not in _STOP_REASONS:
        known = ", ".join(_STOP_REASONS)
        raise InvalidArgumentError(f"{where}: status is {value!r}, not one of {known}; omit unsampled samples")
    return value


def _versions(sample: Any, fields: Row) -> Row:
    """Return the policy version of each token, -1 between the engine's calls. Return the oldest version if the calls
    cannot be matched with tokens."""
    versions = [version_of(label) for label in attribute(sample, "weight_versions") or ()]
    mask = fields["loss_mask"] != 0
    segments = np.cumsum(mask & ~np.concatenate([[False], mask[:-1]]))
    if len(set(versions)) < 2 or segments[-1] != len(versions):
        return {"policy_version": min(versions, default=-1)}
    return {"policy_versions": np.where(mask, np.array(versions)[segments - 1], -1)}


def _present(sample: Any, choice: Choice) -> dict[str, Any]:
    """Return the sample's attributes that are not None. Tensors of images are entries of their own."""
    values = {name: value for name, value in attributes(sample).items() if value is not None}
    return values if _IMAGES in choice.ignore else unpacked(values, _IMAGES)


def _columns(present: Mapping[str, Any], choice: Choice, where: str) -> Row:
    """Return the chosen columns that the sample has. For example, a sample without images has no column for them."""
    values = {name: present[name] for name in choice.columns if name in present}
    if _MASK in values:
        if _MASK_OFFSETS not in present:
            raise InvalidArgumentError(f"{where}: {_MASK} has no {_MASK_OFFSETS}; pass both for each sample")
        values[f"{_MASK}_offsets"] = present[_MASK_OFFSETS]
    return {
        name: routes(value, name, len(present["tokens"]), where) if name == _ROUTES else array_of(value, name, where)
        for name, value in values.items()
    }
