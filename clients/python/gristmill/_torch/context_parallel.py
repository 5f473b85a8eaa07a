"""Cuts a shard for one of the context-parallel ranks of its data-parallel rank (specification, section 15)."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch

from gristmill._torch.given_values import given_of, pieces_of
from gristmill._torch.shard_files import Tensors
from gristmill._wire.column_spec import AXIS_TENSORS
from gristmill._wire.context_parallel import row_positions, tree_padding, tree_positions
from gristmill.errors import FailedPreconditionError, InvalidArgumentError

NO_LABEL = -100
"""The label of a token that predicts none, which `torch.nn.functional.cross_entropy` ignores."""


def cut_shard(tensors: Tensors, metadata: dict[str, Any], cp_rank: int) -> tuple[Tensors, dict[str, Any]]:
    """Return the tensors of a context-parallel rank, and the metadata with its `cp_rank`. Tensors with one value per
    row are whole. Raises FailedPreconditionError if the run does not cut shards."""
    where = f"run {metadata['run']!r}: cp_rank is {cp_rank!r}"
    if (cut := metadata.get("context_parallel")) is None:
        raise FailedPreconditionError(f"{where}, but the run has cp_shards: none; create it with cp_size and cp_shards")
    if not isinstance(cp_rank, Integral) or cp_rank not in range(cut["size"]):
        raise InvalidArgumentError(f"{where} and cp_size is {cut['size']}; expected 0..{cut['size'] - 1}")
    result = {name: raw for name, raw in tensors.items() if "/" not in name}
    for prefix in dict.fromkeys(name.partition("/")[0] for name in tensors if "/" in name):
        block = {name.partition("/")[2]: raw for name, raw in tensors.items() if name.startswith(f"{prefix}/")}
        result |= {f"{prefix}/{name}": raw for name, raw in _of_rank(block, cut, cp_rank).items()}
    return result, {**metadata, "cp_rank": cp_rank}


def _of_rank(block: Tensors, cut: dict[str, Any], cp_rank: int) -> Tensors:
    """Return a rank's tensors of a micro-batch: those of whole tokens at its positions, and those of responses at the
    positions of the tokens that it predicts."""
    places = (_in_tree if "parents" in block else _in_rows)(block, cut, cp_rank)
    queries, predicted = places["query_positions"], places["label_positions"]
    labels = block["sequences"][predicted]
    labels[~places.pop("has_label")] = NO_LABEL
    tensors = {name: places[name].int() for name in places} | {"labels": labels}
    tensors |= {name: raw for name, raw in block.items() if name in AXIS_TENSORS}
    of_columns = {f"{name}_{kind}" for name in block for kind in ("offsets", "pieces")}
    for name in block.keys() - of_columns - AXIS_TENSORS:
        at = queries if name in cut["token_tensors"] else predicted
        is_ragged = f"{name}_offsets" in block
        tensors |= _ragged(name, block, at) if is_ragged else {name: block[name][at]}
        if (pieces := block.get(f"{name}_pieces")) is not None:
            given = given_of(pieces, block[name], 1)[at]
            tensors[f"{name}_pieces"] = pieces_of(given, tensors[name])
    return tensors


def _in_rows(block: Tensors, cut: dict[str, Any], cp_rank: int) -> Tensors:
    """Return a rank's positions, and for each the position of the row's next token. A row's last position predicts none
    and has the position of the row's first token, for which tensors of responses have no value."""
    edges = block["cu_seqlens_padded"].long()
    queries = torch.from_numpy(row_positions(edges.numpy(), cut["shards"], cut["size"], cp_rank))
    following = torch.arange(1, int(edges[-1]) + 1)
    following[edges[1:] - 1] = edges[:-1]
    ends = block["cu_seqlens"].long().diff().repeat_interleave(edges.diff())
    has_label = block["position_ids"] + 1 < ends
    return {
        "query_positions": queries,
        "label_positions": following[queries],
        "has_label": has_label[queries],
    }


def _in_tree(block: Tensors, cut: dict[str, Any], cp_rank: int) -> Tensors:
    """Return a rank's positions, and the positions of the tokens whose parents are among them: a token may have no such
    token, or several. `label_queries`: the index of each one's parent in the rank's positions."""
    parents = block["parents"].long()
    queries = torch.from_numpy(tree_positions(block["position_ids"].long().numpy(), cut["size"], cp_rank))
    # The last element is for roots, whose parent is -1.
    indices = torch.full((len(parents) + 1,), -1)
    indices[queries] = torch.arange(len(queries))
    of_parents = indices[parents]
    predicted = (of_parents >= 0).nonzero().squeeze(1)
    is_padding = torch.from_numpy(tree_padding(parents.numpy(), block["row_ends"].long().numpy()))
    return {
        "query_positions": queries,
        "label_positions": predicted,
        "label_queries": of_parents[predicted],
        "has_label": ~is_padding[predicted],
    }


def _ragged(name: str, block: Tensors, at: torch.Tensor) -> Tensors:
    """Return the values of some cells of a ragged column, and their offsets."""
    values, offsets = block[name], block[f"{name}_offsets"]
    counts = offsets.diff()[at]
    cut = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    chosen = torch.arange(int(cut[-1])) + (offsets[:-1][at] - cut[:-1]).repeat_interleave(counts)
    return {name: values[chosen], f"{name}_offsets": cut}
