"""docs/shards.md lists what shards hold: every tensor with its dtype and shape, and all metadata."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import pytest
from safetensors import safe_open
from safetensors.torch import load

from gristmill._wire.column_spec import CP_TENSORS, SHARD_TENSORS
from tests.pipeline.written import built, column, files
from tests.strategies import Row

PAGE = Path(__file__).parents[2] / "docs/shards.md"
LAYOUTS: list[dict[str, Any]] = [
    {"pad_width": "shard"},
    {"pad_width": "batch", "pad_to_multiple_of": 4},
    {"pad_width": "micro_batch"},
    {"layout": "packed", "pad_rows_to_multiple_of": 4},
    {"layout": "prefix_tree", "pad_rows_to_multiple_of": 4},
]
# The tensors that say where rows are on the axis of one layout.
OF_AXES = {
    "packed": {"cu_seqlens", "cu_seqlens_padded"},
    "prefix_tree": {"parents", "segment_starts", "segment_parents", "row_ends"},
}
COLUMNS: list[dict[str, Any]] = [
    {"name": "experts", "dtype": "int16", "scope": "token", "shape": [2, 3], "required": False, "partial": True},
    {"name": "teacher", "dtype": "bfloat16", "scope": "response", "shape": [2]},
    {"name": "verdict", "dtype": "bool", "scope": "row"},
    {"name": "images", "dtype": "uint8", "scope": "items", "shape": [4]},
    {"name": "choices", "dtype": "int32", "scope": "token", "shape": [None]},
    {"name": "mask", "dtype": "int32", "scope": "response", "shape": [None]},
]
_DTYPES = {"int64": "I64", "int32": "I32", "int16": "I16", "uint8": "U8", "bool": "BOOL"} | {
    "float32": "F32",
    "bfloat16": "BF16",
}


class Entry(NamedTuple):
    """A tensor as the page, or a file, has it. shape: in words on the page, such as `(rows, max_total)`."""

    dtype: str
    shape: tuple[Any, ...]


def tables(*columns: str) -> Iterator[dict[str, str]]:
    """All lines of the page's tables that begin with these columns, by column."""
    text = PAGE.read_text(encoding="utf-8")
    for match in re.finditer(r"^\|.*\n\|[ -|]+\n((?:\|.*\n)+)", text, re.MULTILINE):
        names, *lines = (_cells(line) for line in (match[0].splitlines()[0], *match[1].splitlines()))
        if names[: len(columns)] == list(columns):
            yield from (dict(zip(names, cells, strict=True)) for cells in lines)


def _cells(line: str) -> list[str]:
    """The cells of a table's line; of one that is code alone, what it says."""
    return [re.sub(r"^`([^`]*)`$", r"\1", cell.strip()) for cell in line.split("|")[1:-1]]


def tensors_listed() -> Iterator[dict[str, str]]:
    """The lines about built-in tensors; those with one shape have it in both layouts."""
    for line in tables("tensor", "dtype"):
        shape = line.get("shape", "")
        shapes = {"left_padded": shape, "packed": shape, **line, "tensor": line["tensor"].rpartition("/")[2]}
        yield {"prefix_tree": shapes["packed"], **shapes}


def documented(layout: str) -> dict[str, Entry]:
    """Every tensor that the page says this layout may have, without the micro-batch before its name."""
    listed = {}
    others = set().union(*(names for other, names in OF_AXES.items() if other != layout))
    for line in tensors_listed():
        if (shape := line[layout]) and line["tensor"] not in others:
            listed[line["tensor"]] = Entry(_DTYPES[line["dtype"]], _words(shape))
    for spec in columns_of(layout):
        is_ragged = spec.get("shape") == [None]
        scopes = [f"`{spec['scope']}`, `shape: [null]`" if is_ragged else spec["scope"]]
        scopes += [f"`{spec['scope']}`, `partial: true`"] if spec.get("partial") else []
        for line in tables("scope", "tensor"):
            if line["scope"] in scopes:
                name = line["tensor"].replace("NAME", spec["name"])
                dtype = _DTYPES[spec["dtype"] if name == spec["name"] else "int64"]
                shape = line["packed" if layout == "prefix_tree" else layout]
                listed[name] = Entry(dtype, _words(shape, spec.get("shape", ())))
    return listed | {"experts_given": Entry("U8", ("rows",))}


def _words(shape: str, inner: Any = ()) -> tuple[Any, ...]:
    words = [word.strip() for word in shape.strip("()").split(",")]
    return tuple(part for word in words for part in (inner if word == "..." else [word]))


def columns_of(layout: str) -> list[dict[str, Any]]:
    """The declared columns that the layout takes."""
    return [spec for spec in COLUMNS if layout != "prefix_tree" or spec["scope"] != "items"]


def rows(layout: str = "left_padded") -> list[Row]:
    """Two prompts of three samples, with all that a row may bring; the ranks of two need padding rows."""
    received = []
    for prompt, sample in product(range(2), range(3)):
        count = 1 + prompt + sample
        received.append(
            {
                "uid": f"p{prompt}",
                "sample": sample,
                "step": 0,
                "is_last_step": True,
                "prompt_token_ids": list(range(1, 3 + prompt)),
                "response_ids": list(range(20, 20 + count)),
                "loss_mask": [1] * count,
                "rollout_logprobs": [-0.5] * count,
                "policy_versions": [3] * count,
                "reward": float(sample),
                "stop_reason": "stop",
                "tag": "math",
                "reward_components": {"correct": 1.0},
                "step_key": "hall",
                "partition": "math",
                "agent": "solver",
                "episode": "first",
                "experts": np.zeros((2 + prompt + count, 2, 3), np.int16).tolist(),
                "teacher": np.zeros((count, 2)).tolist(),
                "verdict": True,
                "images": [[1, 2, 3, 4]] * sample,
                "choices": [[token] for token in range(2 + prompt + count)],
                "mask": [[20, 21]] * count,
                "values": [0.5] * count,
            }
        )
        if layout == "prefix_tree":
            del received[-1]["images"]
    return received


SETTINGS: dict[str, Any] = {
    "train_batch_size": 2,
    "n_samples_per_prompt": 3,
    "policy_mini_batch_size": 2,
    "critic_mini_batch_size": 2,
    "micro_batch": {"size": 2},
    "dp_size": 4,
    "advantage_estimator": "gae",
    "token_step": True,
    "observation_weight": 0.5,
}


def shards(source: str = "rollout", **changes: Any) -> dict[str, bytes]:
    """The files of both models, by model and rank."""
    layout = changes.get("layout", "left_padded")
    config = SETTINGS | {"columns": [*columns_of(layout), column("values", source)]} | changes
    return {f"{at.model} {at.rank}": data for at, data in files(built(rows(layout), config)).items()}


def entries(data: bytes) -> dict[str, Entry]:
    header = orjson.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return {
        name: Entry(entry["dtype"], tuple(entry["shape"])) for name, entry in header.items() if name != "__metadata__"
    }


def metadata(data: bytes, tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "shard").write_bytes(data)
    with safe_open(tmp_path / "shard", "np") as file:
        return {name: orjson.loads(value) for name, value in file.metadata().items()}


@pytest.mark.parametrize("changes", LAYOUTS, ids=str)
def test_every_tensor_of_every_layout_is_on_the_page_and_no_other(changes: dict[str, Any], tmp_path: Path) -> None:
    layout = changes.get("layout", "left_padded")
    page = documented(layout)
    page["values"] = Entry("F32", page["loss_mask"].shape)
    for data in shards(**changes).values():
        actual = entries(data)
        assert {name.rpartition("/")[2] for name in actual} == page.keys()
        for name, entry in actual.items():
            assert entry.dtype == page[name.rpartition("/")[2]].dtype, name
        _check_shapes(actual, page, metadata(data, tmp_path)["micro_batches"])


def _check_shapes(actual: dict[str, Entry], page: dict[str, Entry], micro_batches: list[list[int]]) -> None:
    """Each word of a shape is one number within a micro-batch, and over the shard."""
    sizes: dict[tuple[str, str], int] = {}
    for name, entry in actual.items():
        prefix, _, bare = name.rpartition("/")
        rows = len(micro_batches[int(prefix[-3:])]) if prefix else sum(map(len, micro_batches))
        assert len(entry.shape) == len(page[bare].shape), name
        for word, size in zip(page[bare].shape, entry.shape, strict=True):
            expected = {"rows": rows, "rows + 1": rows + 1}.get(word, word)
            if isinstance(expected, int):
                assert size == expected, name
            else:
                assert sizes.setdefault((prefix, expected), size) == size, name


def test_the_page_has_no_tensor_that_a_client_does_not_know() -> None:
    assert {line["tensor"] for line in tensors_listed()} == set(SHARD_TENSORS)


def test_the_page_lists_the_tensors_of_context_parallel_ranks() -> None:
    assert [line["of context-parallel ranks"] for line in tables("of context-parallel ranks")] == list(CP_TENSORS)


def test_padding_rows_have_what_the_page_says() -> None:
    tensors = load(shards()["policy 3"])
    at = len(tensors["row"]) - 1
    for line in tables("tensor", "dtype", "shape", "content", "padding rows"):
        assert tensors[line["tensor"]][at] == int(line["padding rows"])
    assert not tensors["loss_mask"][at].any()
    assert tensors["attention_mask"][at].sum() == 2


@pytest.mark.parametrize("changes", LAYOUTS, ids=str)
def test_tensors_that_are_there_only_sometimes_are_marked_so(changes: dict[str, Any]) -> None:
    layout = changes.get("layout", "left_padded")
    plain = [
        {name: value for name, value in row.items() if name not in ("rollout_logprobs", "policy_versions")}
        for row in rows(layout)
    ]
    columns = [*columns_of(layout), column("values", "rollout")]
    less = {"advantage_estimator": "grpo", "token_step": False, "observation_weight": 0.0}
    config = SETTINGS | less | {"columns": columns} | changes
    left = {name.rpartition("/")[2] for data in files(built(plain, config)).values() for name in entries(data)}
    absent = {line["tensor"] for line in tensors_listed() if line["content"].startswith("only ")}
    assert absent == documented(layout).keys() - left


@pytest.mark.parametrize("changes", LAYOUTS, ids=str)
def test_a_forward_shard_lacks_what_the_page_says(changes: dict[str, Any]) -> None:
    def bare(data: bytes) -> set[str]:
        return {name.rpartition("/")[2] for name in entries(data)}

    forward, train = shards("trainer", **changes), shards(**changes)
    for name in ("policy 0", "policy 3"):
        assert bare(train[name]) - bare(forward[name]) == {"values", "advantages", "returns"}
        assert bare(forward[name]) < bare(train[name])


def test_all_metadata_is_on_the_page(tmp_path: Path) -> None:
    page = {name for line in tables("name") for name in re.findall(r"\w+", line["name"])}
    of = "of `loss_denominators`"
    divisors = {name: line["meaning"] for line in tables(of) for name in re.findall(r"\w+", line[of])}
    cut: dict[str, Any] = {"cp_size": 2, "cp_shards": "zigzag", "pad_rows_to_multiple_of": 4}
    kinds = [shards(), shards(layout="prefix_tree"), shards(layout="packed", **cut)]
    for data in [data for kind in kinds for data in kind.values()]:
        actual = metadata(data, tmp_path)
        assert actual.keys() | {"response_lengths", "context_parallel"} == page
        assert ("response_lengths" in actual) == ("images" not in load(data))
        assert actual["loss_denominators"].keys() == divisors.keys()
        count = len(actual["uids"])
        for name, description in divisors.items():
            value = actual["loss_denominators"][name]
            assert (
                (len(value) == count)
                if description.startswith("one number per row")
                else isinstance(value, int | float)
            )
