"""The table of a batch: numbers of its rows, trajectories, groups and breaks, without tokens, and its encoding.

Stored once for each published batch. The page, metrics and users read slices and sums of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gristmill._wire.codecs import tensor_file
from gristmill._wire.columns import Array

Columns = dict[str, Array]
MODELS = ("policy", "critic")
MASKED, ALL_MASKED, HAS_ADVANTAGE = 1, 2, 4
PLACE = ("mini_batch", "rank", "micro_batch", "width")
_OF_REWARDS = ("score", "reward", "advantage")
_TEXTS = "texts"
_FORMAT = 1


class Break(NamedTuple):
    """A step that joined no earlier step. against: the step that it is compared with. at: the first
    token of its prompt that differs. before: the equal tokens before
    the first that differs; was, now: those from there in that step, and in its prompt."""

    uid: str
    round: int
    sample: int
    step: int
    against: int
    at: int
    cause: str
    column: str
    before: list[int]
    was: list[int]
    now: list[int]


class TextColumn(NamedTuple):
    """A column of texts. numbers: the index in `texts` of each."""

    texts: list[str]
    numbers: Array

    def array(self) -> Array:
        """Returns the texts as objects: a fixed width is that of the longest text, and ends before trailing NULs."""
        texts = np.array(self.texts, object)[self.numbers]
        # Other libraries know the type of no objects only by this.
        return texts if len(texts) else texts.astype(np.str_)


@dataclass(frozen=True, slots=True, eq=False)
class BatchTable:
    """The numbers of a batch. Arrays of one kind have one length, and are as small as their numbers allow.

    rows: as the plan numbers them, int32: `trajectory`; `prompt`, `length`, `trained`, tokens of the prompt, of the
        whole row, and with loss_mask 1 after filters; `first`, `last`, the numbers of its steps, and `steps`, how many;
        `version`, the oldest policy version. For each model `MODEL.mini_batch`, `rank`, `micro_batch`, -1 for a row
        that alignment dropped, and `width`, the tokens that the row takes with its padding. `cost`, float64: the FLOPs
        that `flops` reads from a column, if it does.
    trajectories: `group`, `sample`, `steps`, `response` (tokens of all its steps), `behind` (policy versions, -1:
        unknown), int32; `score`, `reward`, `advantage`, float64; `agent`, `stop_reason`, numbers of texts; `flags`:
        `MASKED` where a filter masks a step, `ALL_MASKED` where it masks all, `HAS_ADVANTAGE` where an advantage is not
        0. Advantages are before `loss_reduction` scales them; NaN while columns are missing.
    groups: `round`, `tag`, `zero_variance` (all trajectories that are compared score the same, and there are several).
    breaks: steps that joined no earlier step: `trajectory`, `step`, `against` (the step it is compared with), `index`
        (the first token of its prompt that differs), `cause`, `column`. Not examined: -1, with the cause `further`.
    texts: `uids`, `tags`, `agents`, `stop_reasons`, `causes`, `columns`.
    facts: numbers of the whole batch. `credit` is "token" if `advantage` is the mean over a trajectory's tokens.
        `padding_widths`: the widths of each model's padding rows, in the order in which the plan places them.
    """

    rows: Columns
    trajectories: Columns
    groups: Columns
    breaks: Columns
    texts: dict[str, list[str]]
    facts: dict[str, Any]

    @property
    def models(self) -> list[str]:
        return [model for model in MODELS if f"{model}.rank" in self.rows]

    def encode(self) -> bytes:
        """Returns the table as one safetensors file."""
        kinds = {"rows": self.rows, "trajectories": self.trajectories, "groups": self.groups, "breaks": self.breaks}
        tensors = {f"{kind}/{name}": values for kind, columns in kinds.items() for name, values in columns.items()}
        others = json.dumps({"format": _FORMAT, "texts": self.texts, "facts": self.facts}).encode()
        return tensor_file.encode(tensors | {_TEXTS: np.frombuffer(others, np.uint8)})

    @classmethod
    def decode(cls, data: bytes) -> BatchTable:
        """Returns the table that `encode` wrote."""
        tensors = tensor_file.decode(data)
        others = json.loads(tensors.pop(_TEXTS).tobytes())
        kinds: dict[str, Columns] = {"rows": {}, "trajectories": {}, "groups": {}, "breaks": {}}
        for name, values in tensors.items():
            kind, _, column = name.partition("/")
            # Copied, because the views are read-only and may be unaligned.
            kinds[kind][column] = values.copy()
        return cls(**kinds, texts=others["texts"], facts=others["facts"])

    def shown_breaks(self) -> Iterator[Break]:
        """Yields the first breaks that are examined, with the tokens around them."""
        names = ("trajectory", "step", "against", "index", "cause", "column")
        every = zip(*(self.breaks[name].tolist() for name in names), strict=True)
        examined = (one for one in every if one[3] >= 0)
        for (trajectory, step, against, index, cause, column), around in zip(
            examined, self.facts["around"], strict=False
        ):
            group = int(self.trajectories["group"][trajectory])
            yield Break(
                self.texts["uids"][group],
                int(self.groups["round"][group]),
                int(self.trajectories["sample"][trajectory]),
                step,
                against,
                index,
                self.texts["causes"][cause],
                self.texts["columns"][column] if column >= 0 else "",
                *around,
            )

    def by_row(self) -> dict[str, Array]:
        """Returns one entry per training row in each column: an array of numbers, bools or text, as docs/table.md lists
        them."""
        columns = self.columns_by_row()
        return {name: column.array() if isinstance(column, TextColumn) else column for name, column in columns.items()}

    def columns_by_row(self) -> dict[str, Array | TextColumn]:
        """Returns the columns of `by_row`, without an array of texts."""
        rows, trajectories, groups = self.rows, self.trajectories, self.groups
        owner = rows["trajectory"]
        group = trajectories["group"][owner]
        policy = {name: rows[f"policy.{name}"] for name in PLACE}
        critic = {f"critic_{name}": rows[f"critic.{name}"] for name in PLACE if "critic" in self.models}
        return {
            "row": np.arange(len(owner)),
            "uid": TextColumn(self.texts["uids"], group),
            "round": groups["round"][group],
            "tag": TextColumn(self.texts["tags"], groups["tag"][group]),
            "sample": trajectories["sample"][owner],
            "agent": TextColumn(self.texts["agents"], trajectories["agent"][owner]),
            "trajectory": owner,
            "step_first": rows["first"],
            "step_last": rows["last"],
            "steps": rows["steps"],
            "prompt_tokens": rows["prompt"],
            "tokens": rows["length"],
            "loss_tokens": rows["trained"],
            "policy_version": rows["version"],
            **policy,
            **critic,
            "padding_tokens": np.where(policy["rank"] < 0, 0, policy["width"] - rows["length"]),
            **({"cost": rows["cost"]} if "cost" in rows else {}),
            "score": trajectories["score"][owner],
            "reward": trajectories["reward"][owner],
            "advantage": trajectories["advantage"][owner],
            "response_tokens": trajectories["response"][owner],
            "staleness": trajectories["behind"][owner],
            "stop_reason": TextColumn(self.texts["stop_reasons"], trajectories["stop_reason"][owner]),
            "masked": (trajectories["flags"][owner] & MASKED) > 0,
            "zero_variance": groups["zero_variance"][group],
            "dropped": policy["rank"] < 0,
            # Files of lengths have no rewards.
            **({} if self.facts["has_tokens"] else dict.fromkeys(_OF_REWARDS, np.full(len(owner), np.nan))),
        }
