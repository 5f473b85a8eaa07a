"""The tensors of a shard (specification, sections 7, 8, 10 and 13): of each its dtype, its shape and its values."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from math import ceil, prod
from operator import itemgetter
from typing import Any

import numpy as np

from tests.reference_model import columns
from tests.reference_model.merging import Merged

Config = dict[str, Any]
Tensors = dict[str, tuple[str, list[int], Any]]

ARRAYS = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
    "F16": np.float16,
    "BF16": np.uint16,
    "F32": np.float32,
    "F64": np.float64,
}
DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}


@dataclass
class Line:
    """A row as a shard has it. tokens, responses: by name, a value of each token, and of each response token. scalars:
    one each. items: of declared columns."""

    prompt: int
    tokens: dict[str, list[Any]]
    responses: dict[str, list[Any]]
    scalars: dict[str, Any]
    items: dict[str, list[Any]]

    @property
    def length(self) -> int:
        return len(self.tokens["sequences"])


@dataclass
class Kind:
    """dtype: of safetensors. fill: a value where there is none. shape: of one value; (None,) for any number of them."""

    dtype: str
    fill: Any = 0
    shape: tuple[int | None, ...] = ()

    @property
    def sizes(self) -> list[int]:
        return [size for size in self.shape if size is not None]

    def tensors(self, name: str, shape: list[int], cells: list[Any]) -> Tensors:
        """cells: a value each, or a list of any number. shape: of the tensor with a value per cell."""
        if self.shape != (None,):
            return {name: (self.dtype, [*shape, *self.sizes], cells)}
        ends = [sum(map(len, cells[:end])) for end in range(len(cells) + 1)]
        offsets = "I64", [len(ends)], ends
        flat = [value for cell in cells for value in cell]
        return {name: (self.dtype, [ends[-1]], flat), f"{name}_offsets": offsets}


@dataclass
class Pieces(Kind):
    """The runs of cells with a value, given whether each has one. unit: the bytes of a value."""

    unit: int = 0

    def tensors(self, name: str, shape: list[int], cells: list[Any]) -> Tensors:
        runs = [[place for place, _ in run] for has, run in groupby(enumerate(cells), itemgetter(1)) if has]
        lines = [[-1, run[0] * self.unit, len(run) * self.unit, run[0] * self.unit] for run in runs]
        return {name: ("I64", [len(lines), 4], lines)}


def has_pieces(column: dict[str, Any]) -> bool:
    return bool(column.get("partial")) and column.get("shape") != [None]


@dataclass
class Form:
    """The tensors of a batch's shards, by name: of all tokens, of response tokens, and of rows."""

    tokens: dict[str, Kind]
    responses: dict[str, Kind]
    scalars: dict[str, Kind]
    items: dict[str, Kind]


def form_of(config: Config, *, has_logprobs: bool, has_versions: bool, has_returns: bool) -> Form:
    form = Form({"sequences": Kind("I32", config["pad_token_id"])}, {}, {}, {})
    form.responses |= {name: Kind("U8") for name in ("response_mask", "loss_mask")}
    floats = {"rewards": True, "advantages": True, "returns": has_returns, "rollout_logprobs": has_logprobs}
    form.responses |= {name: Kind("F32") for name, is_there in floats.items() if is_there}
    if has_versions:
        form.responses["token_policy_version"] = Kind("I32", -1)
    if config["token_step"]:
        form.responses["token_step"] = Kind("I32", -1)
    if config["observation_weight"]:
        form.responses["loss_weight"] = Kind("F32")
    form.scalars |= {
        **{name: Kind("I32", -1) for name in ("row", "sample", "step_first", "step_last", "policy_version")},
        **{name: Kind("U8", 1) for name in ("is_last_step", "is_padding")},
    }
    for column in config["columns"]:
        by_scope = {"token": form.tokens, "response": form.responses, "row": form.scalars, "items": form.items}
        shape = tuple(column.get("shape", []))
        fill = columns.filled(column)
        by_scope[column["scope"]][column["name"]] = Kind(DTYPES[column["dtype"]], fill, shape)
        if has_pieces(column):
            unit = prod(shape) * np.dtype(ARRAYS[DTYPES[column["dtype"]]]).itemsize
            by_scope[column["scope"]][f"{column['name']}_pieces"] = Pieces("I64", False, (), unit)
        if not column.get("required", True):
            form.scalars[f"{column['name']}_given"] = Kind("U8", 0)
    return form


def line_of(number: int, row: Merged, responses: dict[str, list[float]], form: Form, config: Config) -> Line:
    """responses: rewards, advantages and, with credit per token, returns, of each response token."""
    steps, declared = row.trajectory.steps, config["columns"]
    last = steps[row.path[-1]]

    def values(scope: str) -> dict[str, Any]:
        mine = [column for column in declared if column["scope"] == scope]
        has_value = {
            f"{column['name']}_pieces": [value is not None for value in columns.of_tokens(row, column)]
            for column in mine
            if has_pieces(column)
        }
        return {column["name"]: columns.value(row, column) for column in mine} | has_value

    of_responses: dict[str, list[Any]] = {
        "response_mask": [1] * len(row.sources),
        "loss_mask": row.loss_mask,
        **responses,
    }
    if "rollout_logprobs" in form.responses:
        of_responses["rollout_logprobs"] = row.of_tokens([step["rollout_logprobs"] for step in steps], 0.0)
    if "token_policy_version" in form.responses:
        of_responses["token_policy_version"] = row.of_tokens([_versions(step) for step in steps], -1)
    if "token_step" in form.responses:
        of_responses["token_step"] = [-1 if source is None else source[0] for source in row.sources]
    scalars = {
        "row": number,
        "sample": row.trajectory.sample,
        "step_first": row.path[0],
        "step_last": row.path[-1],
        "policy_version": row.policy_version,
        "is_last_step": int(last["is_last_step"]),
        "is_padding": 0,
        **values("row"),
    }
    optional = [column for column in declared if not column.get("required", True)]
    scalars |= {f"{column['name']}_given": int(columns.is_given(row, column)) for column in optional}
    tokens = {"sequences": row.tokens, **values("token")}
    of_responses |= values("response")
    if "loss_weight" in form.responses:
        of_responses["loss_weight"] = _weights(row, config)
    return Line(row.prompt, tokens, of_responses, scalars, values("items"))


def _weights(row: Merged, config: Config) -> list[float]:
    """Those that steps give, or their masks, once; and that of observations, in the first row with their step."""
    is_given = any(column["name"] == "loss_weight" for column in config["columns"])
    given = [step["loss_weight"] for step in row.trajectory.steps] if is_given else row.trajectory.masks
    weights = row.of_tokens(given, 0.0, only_trained=True)
    return [
        config["observation_weight"] if is_new else weight for weight, is_new in zip(weights, row.observes, strict=True)
    ]


def _versions(step: dict[str, Any]) -> list[int]:
    given = step.get("policy_versions")
    return given if given is not None else [step["policy_version"]] * len(step["response_ids"])


def padding_line(form: Form, config: Config) -> Line:
    """The shortest valid row: one response token, the rest prompt."""
    length = max(2, config["pad_to_multiple_of"])
    return Line(
        length - 1,
        {name: [kind.fill] * length for name, kind in form.tokens.items()},
        {name: [kind.fill] for name, kind in form.responses.items()},
        {name: kind.fill for name, kind in form.scalars.items()},
        {name: [] for name in form.items},
    )


Widths = tuple[int, int]
"""Of tensors of all tokens, and of response tokens."""


def widths_of(lines: list[Line], config: Config) -> Widths:
    multiple = config["pad_to_multiple_of"]
    longest = max(line.length for line in lines), max(line.length - line.prompt for line in lines)
    return tuple(ceil(length / multiple) * multiple for length in longest)


def tensors_of(
    micro_batches: list[list[tuple[Line, int]]], widths: list[Widths], form: Form, config: Config
) -> Tensors:
    """A shard's tensors. micro_batches: its rows, each with how many first tokens it shares with the row before it.
    widths: of each micro-batch, for the padded layout."""
    lines = [line for rows in micro_batches for line, _ in rows]
    tensors: Tensors = {}
    for name, kind in form.scalars.items():
        tensors[name] = kind.dtype, [len(lines), *kind.sizes], [line.scalars[name] for line in lines]
    for name, kind in form.items.items():
        every = [item for line in lines for item in line.items[name]]
        tensors[name] = kind.dtype, [len(every), *kind.sizes], every
        ends = [sum(len(line.items[name]) for line in lines[:end]) for end in range(len(lines) + 1)]
        tensors[f"{name}_offsets"] = "I64", [len(ends)], ends
    if config["layout"] == "left_padded" and config["pad_width"] != "micro_batch":
        return tensors | _padded(lines, widths[0], form)
    for index, rows in enumerate(micro_batches):
        if config["layout"] == "left_padded":
            block = _padded([line for line, _ in rows], widths[index], form)
        else:
            tails = tails_of(rows, config)
            block = _on_axis(rows, tails, form)
            if config["layout"] == "prefix_tree":
                block |= _tree(rows, tails)
            else:
                block |= _edges("cu_seqlens", [line.length for line, _ in rows])
                if config["pad_rows_to_multiple_of"] > 1 or config["pad_packed_to"]:
                    padded = [line.length + tail for (line, _), tail in zip(rows, tails, strict=True)]
                    block |= _edges("cu_seqlens_padded", padded)
        tensors |= {f"micro_batch_{index:03d}/{name}": tensor for name, tensor in block.items()}
    return tensors


def _padded(lines: list[Line], widths: Widths, form: Form) -> Tensors:
    tensors: Tensors = {}

    def add(name: str, kind: Kind, width: int, of_lines: list[list[Any]]) -> None:
        padded = [value for values in of_lines for value in [kind.fill] * (width - len(values)) + values]
        tensors.update(kind.tensors(name, [len(lines), width], padded))

    for name, kind in form.tokens.items():
        add(name, kind, widths[0], [line.tokens[name] for line in lines])
    for name, kind in form.responses.items():
        add(name, kind, widths[1], [line.responses[name] for line in lines])
    add("attention_mask", Kind("U8"), widths[0], [[1] * line.length for line in lines])
    return tensors


def _edges(name: str, lengths: list[int]) -> Tensors:
    return {name: ("I32", [len(lengths) + 1], [sum(lengths[:end]) for end in range(len(lengths) + 1)])}


def tails_of(rows: list[tuple[Line, int]], config: Config) -> list[int]:
    """The padding after each row. A row that the next one continues has none, and its tokens count with that one's."""
    multiple, tails, tokens = config["pad_rows_to_multiple_of"], [0] * len(rows), 0
    for place, (line, shared) in enumerate(rows):
        tokens += line.length - shared
        if place + 1 == len(rows) or rows[place + 1][1] < line.length:
            tails[place] = -tokens % multiple
            tokens = 0
    total = sum(line.length - shared for line, shared in rows) + sum(tails)
    if config["pad_packed_to"]:
        tails[-1] += min(size for size in config["pad_packed_to"] if size >= total) - total
    return tails


def _on_axis(rows: list[tuple[Line, int]], tails: list[int], form: Form) -> Tensors:
    """Rows one after another, each without the tokens that it shares with the row before it, and with padding after
    it."""
    tensors: Tensors = {}

    def add(name: str, kind: Kind, of_lines: list[list[Any]]) -> None:
        values = [
            value
            for line, (_, shared), tail in zip(of_lines, rows, tails, strict=True)
            for value in line[shared:] + [kind.fill] * tail
        ]
        tensors.update(kind.tensors(name, [len(values)], values))

    for name, kind in form.tokens.items():
        add(name, kind, [line.tokens[name] for line, _ in rows])
    for name, kind in form.responses.items():
        add(name, kind, [[kind.fill] * line.prompt + line.responses[name] for line, _ in rows])
    positions = [
        position
        for (line, shared), tail in zip(rows, tails, strict=True)
        for position in range(shared, line.length + tail)
    ]
    tensors["position_ids"] = "I32", [len(positions)], positions
    return tensors


def _tree(rows: list[tuple[Line, int]], tails: list[int]) -> Tensors:
    """The paths of the rows on the axis: parents, segments, ends."""
    parents: list[int] = []
    ends = []
    path: list[int] = []
    for (line, shared), tail in zip(rows, tails, strict=True):
        path = path[:shared]
        for _ in range(line.length - shared):
            parents.append(path[-1] if path else -1)
            path.append(len(parents) - 1)
        ends.append(path[-1])
        parents += [len(parents) - 1 + index for index in range(tail)]
    children = [0] * len(parents)
    for parent in parents:
        if parent >= 0:
            children[parent] += 1
    starts = [
        token for token, parent in enumerate(parents) if parent < 0 or parent != token - 1 or children[parent] > 1
    ]
    segment_of = [sum(start <= token for start in starts) - 1 for token in range(len(parents))]
    above = [segment_of[parents[start]] if parents[start] >= 0 else -1 for start in starts]
    lists = {"parents": parents, "segment_starts": starts, "segment_parents": above, "row_ends": ends}
    return {name: ("I32", [len(values)], values) for name, values in lists.items()}
