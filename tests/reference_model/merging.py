"""Which steps become one training row (specification, section 3), and what columns keep apart (section 8)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.reference_model import columns
from tests.reference_model.rows import Config, Trajectory

Token = tuple[int, int]
"""A sampled token: its step, and its index in that step's response."""


@dataclass
class Merged:
    """A training row.

    path: its steps. tokens: all of them, `prompt` of which are its prompt. sources: of each response token, the sampled
    token that it is; None for an observation. trains: whether this is the first row that has it. holders: of each
    token, the first step that has it. own: the steps that are in no earlier row.
    """

    trajectory: Trajectory
    path: list[int]
    tokens: list[int]
    prompt: int
    sources: list[Token | None]
    holders: list[int]
    trains: list[bool] = field(default_factory=list)
    own: set[int] = field(default_factory=set)

    def of_tokens(self, values: Any, otherwise: Any, only_trained: bool = False) -> list[Any]:
        """A value of each response token. values: by step, of each token of its response."""
        return [
            otherwise if source is None or (only_trained and not trains) else values[source[0]][source[1]]
            for source, trains in zip(self.sources, self.trains, strict=True)
        ]

    @property
    def partition(self) -> str:
        return str(self.trajectory.steps[self.path[0]]["partition"])

    @property
    def observes(self) -> list[bool]:
        """Of each response token, whether it is an observation whose step is in no earlier row."""
        return [
            source is None and holder in self.own
            for source, holder in zip(self.sources, self.holders[self.prompt :], strict=True)
        ]

    @property
    def loss_mask(self) -> list[int]:
        return self.of_tokens(self.trajectory.masks, 0, only_trained=True)

    @property
    def policy_version(self) -> int:
        versions = [self.trajectory.steps[number]["policy_version"] for number in self.path]
        return min((version for version in versions if version >= 0), default=-1)


@dataclass
class Mismatch:
    step: int
    index: int
    cause: str
    column: str


def merged(one: Trajectory, config: Config) -> tuple[list[Merged], list[Mismatch]]:
    """The rows of a trajectory, and the steps that joined none."""
    rows: list[Merged] = []
    # Of each step: what its row was when it ended there.
    at: list[Merged] = []
    mismatches = []
    for number, step in enumerate(one.steps):
        prompt, response = step["prompt_token_ids"], step["response_ids"]
        parent, common = _joined(one, number, at, config)
        sampled: list[Token | None] = [(number, index) for index in range(len(response))]
        if parent is None:
            new = Merged(one, [number], prompt + response, len(prompt), sampled, [number] * len(prompt + response))
            if number and config["merge"] != "none":
                mismatches.append(_mismatch(one, number, at, config))
        else:
            before = at[parent]
            observed: list[Token | None] = [None] * (len(prompt) - common)
            new = Merged(
                one,
                [*before.path, number],
                prompt + response,
                before.prompt,
                [*before.sources[: common - before.prompt], *observed, *sampled],
                before.holders[:common] + [number] * (len(prompt) + len(response) - common),
            )
        at.append(new)
        grown = [place for place, row in enumerate(rows) if row.path[-1] == parent]
        if grown:
            rows[grown[0]] = new
        else:
            rows.append(new)
    trained: set[Token | None] = set()
    visited: set[int] = set()
    for row in rows:
        row.trains = [source is not None and source not in trained for source in row.sources]
        row.own = set(row.path) - visited
        trained.update(row.sources)
        visited.update(row.path)
    return rows, mismatches


def _earlier(number: int, config: Config) -> range:
    return {"none": range(0), "prefix": range(max(0, number - 1), number), "tree": range(number)}[config["merge"]]


def _fitting(one: Trajectory, number: int, at: list[Merged], config: Config) -> list[tuple[int, int, int]]:
    """The earlier steps that this one's tokens let it join: the tokens in common, the sequence's length (negative), and
    the step; the best is the largest."""
    prompt = one.steps[number]["prompt_token_ids"]
    fitting = []
    for other in _earlier(number, config):
        common = in_common(at[other].tokens, prompt)
        if common >= max(len(at[other].tokens) - config["retokenized_tail"], at[other].prompt):
            fitting.append((common, -len(at[other].tokens), other))
    return fitting


def _joined(one: Trajectory, number: int, at: list[Merged], config: Config) -> tuple[int | None, int]:
    fitting = [fit for fit in _fitting(one, number, at, config) if not differing(one, fit[2], number, fit[0], config)]
    if not fitting:
        return None, 0
    common, _, other = max(fitting)
    return other, common


def _mismatch(one: Trajectory, number: int, at: list[Merged], config: Config) -> Mismatch:
    prompt = one.steps[number]["prompt_token_ids"]
    fitting = _fitting(one, number, at, config)
    if fitting:
        common, _, other = max(fitting)
        return Mismatch(number, len(prompt), "column", differing(one, other, number, common, config))
    index, other = max((in_common(at[other].tokens, prompt), other) for other in _earlier(number, config))
    is_in_prompt = index < len(one.steps[other]["prompt_token_ids"])
    cause = "truncated" if index == len(prompt) else "prompt" if is_in_prompt else "response"
    return Mismatch(number, index, cause, "")


def differing(one: Trajectory, before: int, after: int, common: int, config: Config) -> str:
    """`partition`, or the first column with `merge: equal` in which two steps differ where they overlap."""
    earlier, later = one.steps[before], one.steps[after]
    if earlier["partition"] != later["partition"]:
        return "partition"
    for column in config["columns"]:
        name, scope = column["name"], column["scope"]
        if column.get("merge") != "equal" or scope == "response":
            continue
        if column.get("partial"):
            pairs = [(columns.at(earlier, column, index), columns.at(later, column, index)) for index in range(common)]
            if any(None not in pair and pair[0] != pair[1] for pair in pairs):
                return str(name)
            continue
        if (name in earlier) != (name in later):
            return str(name)
        if name not in earlier:
            continue
        was, now = earlier[name], later[name]
        if scope == "token":
            was, now = was[:common], now[:common]
        elif scope == "items":
            now = now[: len(was)]
        if was != now:
            return str(name)
    return ""


def in_common(one: list[int], other: list[int]) -> int:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count
