"""What TRL's `GRPOTrainer` generated as rows (`_generate_and_score_completions` of trl/trainer/grpo_trainer.py)."""

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
        "num_items_in_batch": "the trained tokens of the batch, which are counted anew",
        "old_per_token_logps": "the trainer's, computed before the loss",
        "ref_per_token_logps": "the trainer's, computed before the loss",
        "importance_sampling_ratio": "computed from logprobs",
        "num_images": "how many images each row has; read where a column is of images",
        "num_tiles": "how many tiles each row's images have; read where a column is of images",
    },
    needed={
        "pixel_values": "the images of all rows",
        "image_grid_thw": "the sizes of all images",
        "pixel_attention_mask": "what of the images is padding",
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
    """Rows of the mapping that `GRPOTrainer._generate_and_score_completions` returns.

    Prompts lose their padding on the left and completions that on the right. The loss mask is `tool_mask`, or all 1.
    `sampling_per_token_logps` are the logprobs.

    uids: each row's prompt; with `num_generations` each group's, whose rows stand together, as TRL's sampler has them.
    rewards: one number a row, of which the output has none: what `_calculate_rewards` returns, weighed and summed.
    samples: each row's number among the samples of its prompt; counted if not given. Give them if the output has only
        some of a prompt's samples, as on one of several ranks.
    end_tokens: token ids that end a completion which was not cut off, such as `trainer.eos_token_ids`: rows then have
        a `stop_reason`, `stop` or `length`.
    advantages: whether rows get TRL's too, for a run with `advantage_estimator: none`.
    tags: one a row, such as a column of the inputs.
    columns: tensors as wide as the completion or as prompt and completion lose their padding too; those of images are
        cut by `num_images`.

        output = trainer._generate_and_score_completions(inputs)
        rows = from_trl(output, uids=["math/17", "math/18"], num_generations=8, rewards=rewards)
    """
    found = TrlOutput.of(output, Choice.of(columns, ignore))
    count = found.padding.rows
    names, scores, own_tags = (
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
            **found.fields(row, advantages),
            **found.columns(row),
            **(found.stop_reason(row, ends) if ends else {}),
            **own_tags[row],
        }
        for row, (uid, sample) in enumerate(zip(names, numbers, strict=True))
    ]


@dataclass(frozen=True)
class TrlOutput:
    """tensors: by name, a line a row but for images. images: columns that are of images, cut at the rows. names: the
    columns."""

    tensors: Mapping[str, Array]
    images: Mapping[str, list[Array]]
    names: tuple[str, ...]
    padding: Padded

    @classmethod
    def of(cls, output: Mapping[str, Any], choice: Choice) -> TrlOutput:
        given = {name: value for name, value in output.items() if value is not None}
        _KEYS.check(given, choice)
        wanted = (_KEYS.fields | set(choice.columns)) & given.keys()
        tensors = {name: array_of(given[name], name, _WHAT) for name in wanted}
        padding = _padding(tensors)
        of_images = [name for name in choice.columns if name in _OF_IMAGES]
        images = {name: _by_row(name, tensors[name], given, padding.rows) for name in of_images}
        return cls(tensors, images, choice.columns, padding)

    @property
    def loss_mask(self) -> Array:
        """As wide as the completions, which it may have padding beyond."""
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
            raise InvalidArgumentError(f"{_WHAT}: {name} has the shape {tensors[name].shape}; expected rows and tokens")
    prompts, completions = tensors["prompt_mask"], tensors["completion_mask"]
    check_shape("prompt_ids", tensors["prompt_ids"], prompts.shape, _WHAT)
    for name in ("completion_ids", "tool_mask", "sampling_per_token_logps"):
        if name in tensors:
            check_shape(name, tensors[name], (len(prompts), *completions.shape[1:]), _WHAT)
    empty = ~(completions != 0).any(1)
    if empty.any():
        raise InvalidArgumentError(
            f"{_WHAT}: row {int(empty.argmax())}: completion_mask is 0 on every token, so that nothing says where the "
            "completion ends; turn mask_truncated_completions off: the run's overlong_filter masks them"
        )
    return Padded(prompts, completions, "prompt_mask and completion_mask", _WHAT)


def _uids(uids: Sequence[str | int], num_generations: int | None, count: int) -> list[str]:
    """One a row."""
    names = [uid_of(uid, f"{_WHAT}: uids[{position}]") for position, uid in enumerate(uids)]
    if num_generations is None:
        return list(aligned("uids", names, count, _WHAT))
    if num_generations < 1 or count != len(names) * num_generations:
        raise InvalidArgumentError(
            f"{_WHAT}: {len(names)} uids of {num_generations} generations each for {count} rows; give a uid a group, "
            "and whole groups"
        )
    if len(set(names)) < len(names):
        twice = next(name for position, name in enumerate(names) if name in names[:position])
        raise InvalidArgumentError(
            f"{_WHAT}: uid {twice!r} names two groups; a prompt that comes twice is another round"
        )
    return [name for name in names for _ in range(num_generations)]


def rewards_of(rewards: Any, count: int) -> NDArray[np.float64]:
    """One a row, (count,). Raises InvalidArgumentError for others, and where no function scored a row."""
    found = array_of(rewards, "rewards", _WHAT)
    if found.shape != (count,):
        raise InvalidArgumentError(
            f"{_WHAT}: rewards has the shape {found.shape}; expected one number for each of {count} rows: weigh and "
            "sum the reward functions'"
        )
    if np.isnan(found).any():
        row = int(np.isnan(found).argmax())
        raise InvalidArgumentError(
            f"{_WHAT}: row {row}: its reward is nan: no function scored it; give a reward, such as 0"
        )
    return found.astype(np.float64)


def _advantage(tensors: Mapping[str, Array], padding: Padded, row: int) -> Any:
    if "advantages" not in tensors:
        raise InvalidArgumentError(f"{_WHAT}: advantages is missing; ask for none")
    found = tensors["advantages"]
    return float(found[row]) if found.ndim == 1 else padding.response(found, row)


def _by_row(name: str, values: Array, given: Mapping[str, Any], count: int) -> list[Array]:
    """Cuts a tensor of all images at the rows: an image, a tile or a patch of one is an entry of it."""
    if "num_images" not in given:
        raise InvalidArgumentError(f"{_WHAT}: num_images is missing, which says how many of {name} each row has")
    images = array_of(aligned("num_images", given["num_images"], count, _WHAT), "num_images", _WHAT).astype(np.int64)
    ways = [images]
    if "num_tiles" in given:
        ways.append(array_of(given["num_tiles"], "num_tiles", _WHAT).astype(np.int64))
    if "image_grid_thw" in given:
        patches = array_of(given["image_grid_thw"], "image_grid_thw", _WHAT).prod(1)
        ends = np.concatenate([[0], np.cumsum(patches)])[np.concatenate([[0], np.cumsum(images)])]
        ways.append(np.diff(ends))
    fitting = [counts for counts in ways if counts.sum() == len(values)]
    if not fitting:
        raise InvalidArgumentError(
            f"{_WHAT}: {name} has {len(values)} entries for {int(images.sum())} images, neither one each nor as many "
            "as their patches; cut it by row yourself, and put it into the rows"
        )
    return np.split(values, np.cumsum(fitting[0])[:-1])
