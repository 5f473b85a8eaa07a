"""Converts verl's rollouts to rows: its agent loops' padded `DataProto`, and its v1 trainers' nested `TensorDict`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gristmill._converters.keys import Choice, Keys, Row, remedy_of
from gristmill._converters.padding import Padded, Ragged, check_shape
from gristmill._converters.refusals import refusing
from gristmill._converters.rows import as_steps, samples_as_they_come, tagged
from gristmill._converters.values import aligned, array_of, entries_of, uid_of, version_of
from gristmill._wire.columns import Array
from gristmill.errors import InvalidArgumentError

_WHAT = "verl batch"
_IMAGES = "multi_modal_inputs"
# Names of tensors (verl/experimental/agent_loop/agent_loop.py, verl/trainer/ppo). Other entries belong to the data set
# and the agent loops; of these, only _IMAGES and those of reward functions are checked.
_ROUTES = "routed_experts"
_KEYS = Keys(
    _WHAT,
    frozenset(
        {
            *("prompts", "responses", "response_mask", "attention_mask"),
            *("rollout_log_probs", "rm_scores", "token_level_scores"),
        }
    ),
    ignored={
        "input_ids": "prompts and responses",
        "position_ids": "follow from the attention mask, unless they have several axes",
        "loss_mask": "response_mask",
        "old_log_probs": "computed by the trainer before the loss",
        "ref_log_prob": "computed by the trainer before the loss",
        "entropys": "computed by the trainer",
        "values": "computed by the critic",
        "token_level_rewards": "the scores minus a penalty that the trainer computes",
        "advantages": "computed from the scores",
        "returns": "computed from the scores",
        "reward_baselines": "computed from the scores",
        "rollout_is_weights": "computed from logprobs",
    },
    needed={
        _ROUTES: "the routed experts of every token",
        "teacher_ids": "the teacher's most likely tokens",
        "teacher_logprobs": "the teacher's logprobs",
    },
)


@refusing(_WHAT)
def from_verl(
    batch: Any,
    *,
    uids: Sequence[str | int] | None = None,
    keys: Sequence[str] | None = None,
    token_rewards: bool = False,
    tags: Sequence[str | None] | None = None,
    round: int = 0,
    attempt: int = 0,
    policy_version: int | None = None,
    columns: Iterable[str] = (),
    ignore: Iterable[str] = (),
) -> list[Row]:
    """Convert the output of verl's agent loops: a `DataProto`, or a `TensorDict` (or mapping) of the v1 trainers.

    Removes the padding on the left of prompts and on the right of responses, by `attention_mask`. Nested tensors have
    no padding. `response_mask` is the loss mask: tokens of tools stay in the response, but are not trained. The reward
    is the sum of `rm_scores`, or of `token_level_scores`; with `token_rewards`, these are rewards per token. Without
    both, the reward is pending. `min_global_steps` is by default the policy version.

    uids: the prompt of each row, instead of the batch's `uid`.
    keys: `KVBatchMeta.keys` in any order, from which uid, sample and step are read (`UID_SESSION_INDEX`). Required if
        an agent loop returned several outputs. Without keys, the sample is the `session_id`, or rows are counted.
    tags: one per row, for example `batch.non_tensor_batch["data_source"]`.
    columns: their padding is also removed if they are as wide as the response, or as prompt and response. May contain
        names within `multi_modal_inputs`, and other entries such as those of `meta_info["reward_extra_keys"]`. A row
        whose entry is None has no such column.

        rollouts = agent_loop_manager.generate_sequences(prompts)
        client.submit(from_verl(rollouts, columns=["routed_experts"]))
    """
    choice = Choice.of(columns, ignore)
    rollouts = _Batch.of(batch, choice)
    rows, tag_fields = [], tagged(tags, rollouts.layout.rows, _WHAT)
    for row, (uid, sample) in enumerate(_identities(rollouts, uids, keys)):
        where = f"{_WHAT}: row {row} (uid {uid!r} sample {sample})"
        rows.append(
            {
                "uid": uid,
                "round": round,
                "sample": sample,
                "attempt": attempt,
                "policy_version": rollouts.version(row) if policy_version is None else policy_version,
                **rollouts.fields(row, token_rewards, where),
                **rollouts.columns(choice.columns, row, where),
                **tag_fields[row],
            }
        )
    return as_steps(rows if keys is None else [rows[row] for row in _step_order(keys)])


@dataclass(frozen=True)
class _Batch:
    """Reads rows of a batch.

    tensors: by name, arrays or lists with one entry per row. others: what is not a tensor, by name; one entry per row.
    """

    tensors: Mapping[str, Any]
    others: Mapping[str, Sequence[Any]]
    layout: Padded | Ragged

    @classmethod
    def of(cls, batch: Any, choice: Choice) -> _Batch:
        present, others = _divided(batch)
        of_rewards = (getattr(batch, "meta_info", None) or {}).get("reward_extra_keys") or ()
        named = [name for name in (*of_rewards, *choice.columns) if name in others]
        present |= {name: entries_of(others[name], name, _WHAT) for name in named}
        for name in ("prompts", "responses", "response_mask"):
            if name not in present:
                raise InvalidArgumentError(f"{_WHAT}: {name} is missing; every row needs it")
        present |= _images(others.get(_IMAGES, ()), choice)
        _KEYS.check(present, choice)
        used = (_KEYS.fields | set(choice.columns)) & present.keys()
        tensors = {name: _read(present[name], name) for name in used}
        _check_positions(present, choice)
        return cls(tensors, others, _layout(tensors))

    def fields(self, row: int, token_rewards: bool, where: str) -> Row:
        fields = {
            "prompt_token_ids": self.layout.prompt(self.tensors["prompts"], row),
            "response_ids": self.layout.response(self.tensors["responses"], row),
            "loss_mask": self._response("response_mask", row, where),
            "reward": self._reward(row, token_rewards, where),
        }
        if "rollout_log_probs" in self.tensors:
            fields["rollout_logprobs"] = self._response("rollout_log_probs", row, where)
        return fields

    def columns(self, names: Iterable[str], row: int, where: str) -> Row:
        """Return the columns that the row has. For example, a row without images has no column for them."""
        values = {name: self.tensors[name] for name in names}
        columns = {
            name: array_of(value[row], name, where) if isinstance(value, list) else self.layout.column(value, row)
            for name, value in values.items()
            if value[row] is not None
        }
        if _ROUTES in columns:
            # verl pads with zeros for the last token, for which the engine reports no experts.
            columns[_ROUTES] = columns[_ROUTES][:-1]
        return columns

    def version(self, row: int) -> int:
        """Return the version of the weights that sampled the row's first token; -1 if unknown."""
        if "min_global_steps" in self.others:
            return version_of(self.others["min_global_steps"][row])
        extra = self.others.get("extra_fields")
        return version_of(extra[row].get("min_global_steps")) if extra is not None else -1

    def _response(self, name: str, row: int, where: str) -> Array:
        values = self.tensors[name]
        if np.any(self.layout.outside(values, row)):
            raise InvalidArgumentError(
                f"{where}: {name} is not 0 on padding, where attention_mask is 0; correct one of them"
            )
        return self.layout.response(values, row)

    def _reward(self, row: int, token_rewards: bool, where: str) -> Any:
        names = [name for name in ("rm_scores", "token_level_scores") if name in self.tensors]
        if not names:
            return None
        scores = [self._response(name, row, where) for name in names]
        if len(scores) > 1 and not np.array_equal(scores[0], scores[1]):
            raise InvalidArgumentError(f"{where}: {' and '.join(names)} differ; remove one of them from the batch")
        return scores[0] if token_rewards else math.fsum(scores[0].tolist())


def _divided(batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a batch into tensors and other entries, by name."""
    if hasattr(batch, "non_tensor_batch"):
        tensors = _items(batch.batch) if batch.batch is not None else {}
        return tensors, {name: entries_of(values, name, _WHAT) for name, values in batch.non_tensor_batch.items()}
    if not hasattr(batch, "keys"):
        got = type(batch).__name__
        raise InvalidArgumentError(f"{_WHAT}: got {got}; expected a DataProto, a TensorDict or a mapping of tensors")
    entries = _items(batch)
    tensors = {name: value for name, value in entries.items() if hasattr(value, "__array__")}
    return tensors, {name: value for name, value in entries.items() if name not in tensors}


def _items(tensors: Any) -> dict[str, Any]:
    """Return the items of a mapping, or of a TensorDict, which is not a mapping."""
    return {name: tensors[name] for name in list(tensors.keys())}


def _images(rows: Sequence[Mapping[str, Any] | None], choice: Choice) -> dict[str, list[Any]]:
    """Return the tensors of images, by name. Each has one entry per row, which is None for a row without images."""
    if _IMAGES in choice.ignore:
        return {}
    names = {name: None for row in rows for name in row or ()}
    return {name: [(row or {}).get(name) for row in rows] for name in names}


def _read(tensor: Any, name: str) -> Any:
    is_listed = isinstance(tensor, list) or getattr(tensor, "is_nested", False)
    return entries_of(tensor, name, _WHAT) if is_listed else array_of(tensor, name, _WHAT)


def _check_positions(entries: Mapping[str, Any], choice: Choice) -> None:
    """Refuse position_ids with several axes (of images) unless chosen, because they do not follow from the mask."""
    axes = getattr(entries.get("position_ids"), "ndim", 0) - 1
    if axes > 1 and "position_ids" not in (*choice.columns, *choice.ignore):
        raise InvalidArgumentError(
            f"{_WHAT}: position_ids has several axes, which do not follow from a mask; {remedy_of('position_ids')}"
        )


def _layout(tensors: Mapping[str, Any]) -> Padded | Ragged:
    prompts, responses = tensors["prompts"], tensors["responses"]
    if isinstance(responses, list):
        for name, values in tensors.items():
            aligned(name, values, len(responses), _WHAT)
        return Ragged(len(responses))
    for name, values in (("prompts", prompts), ("responses", responses)):
        if getattr(values, "ndim", 0) != 2:
            raise InvalidArgumentError(f"{_WHAT}: {name} has shape {np.shape(values)}; expected (rows, tokens)")
    if "attention_mask" not in tensors:
        raise InvalidArgumentError(f"{_WHAT}: attention_mask is missing; pass it to identify padding")
    (rows, width), mask = responses.shape, tensors["attention_mask"]
    check_shape("attention_mask", mask, (rows, prompts.shape[1] + width), _WHAT)
    for name in ("response_mask", "rollout_log_probs", "rm_scores", "token_level_scores"):
        if name in tensors:
            check_shape(name, tensors[name], (rows, width), _WHAT)
    return Padded(mask[:, :-width], mask[:, -width:], "attention_mask", _WHAT)


def _identities(batch: _Batch, uids: Sequence[Any] | None, keys: Sequence[str] | None) -> list[tuple[str, int]]:
    """Return each row's uid and sample."""
    count, sessions = batch.layout.rows, batch.others.get("session_id")
    if keys is not None:
        aligned("keys", keys, count, _WHAT)
        return [(uid, session) for uid, session, _ in map(_key, keys)]
    if uids is None and (uids := batch.others.get("uid")) is None:
        raise InvalidArgumentError(f"{_WHAT}: uid is missing, so the groups of rows are unknown; pass uids")
    names = [uid_of(uid, f"{_WHAT}: row {row}") for row, uid in enumerate(aligned("uid", uids, count, _WHAT))]
    if sessions is None:
        return list(zip(names, samples_as_they_come(names), strict=True))
    identities = [
        (uid, int(session)) for uid, session in zip(names, aligned("session_id", sessions, count, _WHAT), strict=True)
    ]
    seen = set[tuple[str, int]]()
    for row, (uid, session) in enumerate(identities):
        if (uid, session) in seen:
            raise InvalidArgumentError(
                f"{_WHAT}: row {row} is of uid {uid!r} session {session}, like an earlier row, and their order is "
                "unknown; pass the keys of the KVBatchMeta"
            )
        seen.add((uid, session))
    return identities


def _key(key: str) -> tuple[str, int, int]:
    """Split a key of verl's queue into uid, session and index."""
    uid, *numbers = str(key).rsplit("_", 2)
    if len(numbers) != 2 or not all(map(str.isdecimal, numbers)):
        raise InvalidArgumentError(f"{_WHAT}: keys has {key!r}; expected UID_SESSION_INDEX, as verl names its rows")
    return uid, int(numbers[0]), int(numbers[1])


def _step_order(keys: Sequence[str]) -> list[int]:
    """Return the rows ordered by their index, which counts the outputs of a session from 0. Raises
    InvalidArgumentError if an output is missing."""
    parsed = list(map(_key, keys))
    for (uid, session), count in Counter(key[:2] for key in parsed).items():
        indices = sorted(index for *identity, index in parsed if tuple(identity) == (uid, session))
        if indices != list(range(count)):
            raise InvalidArgumentError(
                f"{_WHAT}: keys has the outputs {indices} of uid {uid!r} session {session}; pass all outputs of a "
                "trajectory, starting at 0"
            )
    return sorted(range(len(keys)), key=lambda row: parsed[row][2])
