"""Converts TRL's `GRPOTrainer` output to rows (`_generate_and_score_completions` of trl/trainer/grpo_trainer.py)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gristmill._converters.keys import Choice, Keys, Row
from gristmill._converters.padding import Padded, check_shape
from gristmill._converters.refusals import refusing
from gristmill._converters.rows import samples_as_they_come, tagged
from gristmill._converters.values import aligned, array_of, uid_of
from gristmill._wire.columns import Array
from gristmill.errors import InvalidArgumentError

_WHAT = "TRL output"
_KEYS = Keys(
    _WHAT,
    frozenset(
        {
            *("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask"),
            *("sampling_per_token_logps", "advantages"),
        }
    ),
    ignored={
        "num_items_in_batch": "the number of trained tokens in the batch, which is counted again",
        "old_per_token_logps": "computed by the trainer before the loss",
        "ref_per_token_logps": "computed by the trainer before the loss",
        "importance_sampling_ratio": "computed from logprobs",
        "num_images": "the number of images per row; read for columns of images",
        "num_tiles": "the number of tiles of each row's images; read for columns of images",
    },
    needed={
        "pixel_values": "the images of all rows",
        "image_grid_thw": "the sizes of all images",
        "pixel_attention_mask": "the padding of all images",
        "spatial_shapes": "the sizes of all images",
        "image_sizes": "the sizes of all images",
        "image_position_ids": "the positions of all images",
        "token_type_ids": "which tokens are images",
        "mm_token_type_ids": "which tokens are images",
    },
)
_OF_IMAGES = _KEYS.needed.keys() - {"token_type_ids", "mm_token_type_ids"}


@refusing(_WHAT)
def from_trl(
    output: Mapping[str, Any],
    *,
    uids: Sequence[str | int],
    rewards: Any,
    num_generations: int | None = None,
    samples: Sequence[int] | None = None,
    end_tokens: Iterable[int] = (),
    advantages: bool = False,
    tags: Sequence[str | None] | None = None,
    round: int = 0,
    attempt: int = 0,
    policy_version: int = -1,
    columns: Iterable[str] = (),
    ignore: Iterable[str] = (),
) -> list[Row]:
    """Convert the mapping that `GRPOTrainer._generate_and_score_completions` returns.

    Removes the padding on the left of prompts and on the right of completions. The loss mask is `tool_mask`, or all 1.
    The logprobs are `sampling_per_token_logps`.

    uids: the prompt of each row. With `num_generations`, one per group; the rows of a group must be adjacent, as TRL's
        sampler orders them.
    rewards: one number per row, because the output has none: the weighted sum of the result of `_calculate_rewards`.
    samples: each row's number among the samples of its prompt; by default rows are counted. Set it if the output has
        only some of a prompt's samples, as on one of several ranks.
    end_tokens: token ids that end a completion, for example `trainer.eos_token_ids`. Rows then get a `stop_reason`:
        `stop`, or `length` if the completion was cut off.
    advantages: whether to use TRL's advantages, for a run with `advantage_estimator: none`.
    tags: one per row, for example a column of the inputs.
    columns: their padding is also removed if they are as wide as the completion, or as prompt and completion. Columns
        of images are split by `num_images`.

        output = trainer._generate_and_score_completions(inputs)
        rows = from_trl(output, uids=["math/17", "math/18"], num_generations=8, rewards=rewards)
    """
    tensors = TrlOutput.of(output, Choice.of(columns, ignore))
    count = tensors.padding.rows
    names, scores, tag_fields = (
        _uids(uids, num_generations, count),
        rewards_of(rewards, count).tolist(),
        tagged(tags, count, _WHAT),
    )
    numbers = samples_as_they_come(names) if samples is None else aligned("samples", samples, count, _WHAT)
    ends = frozenset(end_tokens)
    return [
        {
            "uid": uid,
            "round": round,
            "sample": sample,
            "step": 0,
            "attempt": attempt,
            "is_last_step": True,
            "policy_version": policy_version,
            "reward": scores[row],
            **tensors.fields(row, advantages),
            **tensors.columns(row),
            **(tensors.stop_reason(row, ends) if ends else {}),
            **tag_fields[row],
        }
        for row, (uid, sample) in enumerate(zip(names, numbers, strict=True))
    ]


@dataclass(frozen=True)
class TrlOutput:
    """Reads rows of a trainer's output.

    tensors: by name, one entry per row except for images. images: the columns of images, split by row. names: the names
        of the columns.
    """

    tensors: Mapping[str, Array]
    images: Mapping[str, list[Array]]
    names: tuple[str, ...]
    padding: Padded

    @classmethod
    def of(cls, output: Mapping[str, Any], choice: Choice) -> TrlOutput:
        present = {name: value for name, value in output.items() if value is not None}
        _KEYS.check(present, choice)
        used = (_KEYS.fields | set(choice.columns)) & present.keys()
        tensors = {name: array_of(present[name], name, _WHAT) for name in used}
        padding = _padding(tensors)
        of_images = [name for name in choice.columns if name in _OF_IMAGES]
        images = {name: _by_row(name, tensors[name], present, padding.rows) for name in of_images}
        return cls(tensors, images, choice.columns, padding)

    @property
    def loss_mask(self) -> Array:
        """Return the loss mask of all rows, as wide as the completions."""
        return self.tensors.get("tool_mask", self.tensors["completion_mask"])

    @property
    def has_logprobs(self) -> bool:
        return "sampling_per_token_logps" in self.tensors

    def fields(self, row: int, advantages: bool) -> Row:
        tensors, padding = self.tensors, self.padding
        fields: Row = {
            "prompt_token_ids": padding.prompt(tensors["prompt_ids"], row),
            "response_ids": padding.response(tensors["completion_ids"], row),
            "loss_mask": padding.response(self.loss_mask, row),
        }
        if self.has_logprobs:
            fields["rollout_logprobs"] = padding.response(tensors["sampling_per_token_logps"], row)
        if advantages:
            fields["advantage"] = _advantage(tensors, padding, row)
        return fields

    def stop_reason(self, row: int, ends: Collection[int]) -> Row:
        last = self.padding.response(self.tensors["completion_ids"], row)[-1]
        return {"stop_reason": "stop" if int(last) in ends else "length"}

    def columns(self, row: int) -> Row:
        return {
            name: self.images[name][row] if name in self.images else self.padding.column(self.tensors[name], row)
            for name in self.names
        }


def _padding(tensors: Mapping[str, Array]) -> Padded:
    for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"):
        if name not in tensors:
            raise InvalidArgumentError(f"{_WHAT}: {name} is missing; every row needs it")
        if tensors[name].ndim != 2:
            raise InvalidArgumentError(f"{_WHAT}: {name} has shape {tensors[name].shape}; expected (rows, tokens)")
    prompts, completions = tensors["prompt_mask"], tensors["completion_mask"]
    check_shape("prompt_ids", tensors["prompt_ids"], prompts.shape, _WHAT)
    for name in ("completion_ids", "tool_mask", "sampling_per_token_logps"):
        if name in tensors:
            check_shape(name, tensors[name], (len(prompts), *completions.shape[1:]), _WHAT)
    empty = ~(completions != 0).any(1)
    if empty.any():
        raise InvalidArgumentError(
            f"{_WHAT}: row {int(empty.argmax())}: completion_mask is 0 on every token, so the end of the completion is "
            "unknown; turn off mask_truncated_completions, and use the run's overlong_filter instead"
        )
    return Padded(prompts, completions, "prompt_mask and completion_mask", _WHAT)


def _uids(uids: Sequence[str | int], num_generations: int | None, count: int) -> list[str]:
    """Return one uid per row."""
    names = [uid_of(uid, f"{_WHAT}: uids[{position}]") for position, uid in enumerate(uids)]
    if num_generations is None:
        return list(aligned("uids", names, count, _WHAT))
    if num_generations < 1 or count != len(names) * num_generations:
        raise InvalidArgumentError(
            f"{_WHAT}: {len(names)} uids of {num_generations} generations each for {count} rows; pass one uid per "
            "group, and whole groups"
        )
    if len(set(names)) < len(names):
        twice = next(name for position, name in enumerate(names) if name in names[:position])
        raise InvalidArgumentError(f"{_WHAT}: uid {twice!r} names two groups; pass a repeated prompt in another round")
    return [name for name in names for _ in range(num_generations)]


def rewards_of(rewards: Any, count: int) -> NDArray[np.float64]:
    """Return one reward per row, (count,). Raises InvalidArgumentError for another shape, and for a row without a
    score."""
    scores = array_of(rewards, "rewards", _WHAT)
    if scores.shape != (count,):
        raise InvalidArgumentError(
            f"{_WHAT}: rewards has shape {scores.shape}; expected one number for each of {count} rows: the weighted "
            "sum of the reward functions"
        )
    if np.isnan(scores).any():
        row = int(np.isnan(scores).argmax())
        raise InvalidArgumentError(
            f"{_WHAT}: row {row}: the reward is nan, because no function scored the row; pass a reward, such as 0"
        )
    return scores.astype(np.float64)


def _advantage(tensors: Mapping[str, Array], padding: Padded, row: int) -> Any:
    if "advantages" not in tensors:
        raise InvalidArgumentError(f"{_WHAT}: advantages is missing; pass advantages=False")
    advantages = tensors["advantages"]
    return float(advantages[row]) if advantages.ndim == 1 else padding.response(advantages, row)


def _by_row(name: str, values: Array, output: Mapping[str, Any], count: int) -> list[Array]:
    """Split a tensor of all images by row. Its entries are images, tiles or patches."""
    if "num_images" not in output:
        raise InvalidArgumentError(f"{_WHAT}: num_images is missing; pass it to split {name} by row")
    images = array_of(aligned("num_images", output["num_images"], count, _WHAT), "num_images", _WHAT).astype(np.int64)
    entries_per_row = [images]
    if "num_tiles" in output:
        entries_per_row.append(array_of(output["num_tiles"], "num_tiles", _WHAT).astype(np.int64))
    if "image_grid_thw" in output:
        patches = array_of(output["image_grid_thw"], "image_grid_thw", _WHAT).prod(1)
        ends = np.concatenate([[0], np.cumsum(patches)])[np.concatenate([[0], np.cumsum(images)])]
        entries_per_row.append(np.diff(ends))
    fitting = [counts for counts in entries_per_row if counts.sum() == len(values)]
    if not fitting:
        raise InvalidArgumentError(
            f"{_WHAT}: {name} has {len(values)} entries for {int(images.sum())} images, neither one per image nor one "
            "per patch; split it by row yourself, and add it to the rows"
        )
    return np.split(values, np.cumsum(fitting[0])[:-1])
