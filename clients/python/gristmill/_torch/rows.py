"""Rows of a shard with their tensors: splits them into micro-batches, and a model's output into rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from operator import add
from typing import Any

import torch

from gristmill._torch.context_parallel import cut_shard
from gristmill._torch.conversion import Conversion
from gristmill._torch.device_copies import Copies
from gristmill._torch.given_values import given_of, pieces_between
from gristmill._torch.jagged import Jagged, Part, jagged, row_spans
from gristmill._torch.jagged import join as join_jagged
from gristmill._torch.shard_files import Tensors, map_shard
from gristmill._torch.token_tree import TokenTree
from gristmill._wire.addresses import Position
from gristmill.errors import FailedPreconditionError, InvalidArgumentError

# Names of metadata with one value per row, including metadata within loss_denominators.
_OF_ROWS = (
    *("uids", "rounds", "stop_reasons", "tags", "reward_components", "step_keys", "agents", "episodes"),
    "response_lengths",
    *("row_tokens", "prompt_tokens", "trajectory_tokens"),
)


class Rows:
    """Rows of a shard with their tensors: a micro-batch, or a whole shard.

    Get tensors by name, as in `rows["sequences"]`. They are converted at first use, or are views of the mapped file.
    Writing to them changes only this process's data.

    metadata: the shard's metadata, such as `uids`, `stop_reasons` and `loss_denominators`. Lists with one value per row
        contain the values of these rows.
    """

    def __init__(
        self, tensors: Tensors, metadata: dict[str, Any], convert: Conversion, copies: Copies | None = None
    ) -> None:
        self._raw = tensors
        self._copies: Copies = copies or {}
        self._convert = convert
        self._converted: Tensors = {}
        self.metadata = metadata

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._size()}>"

    def _size(self) -> str:
        """Return a description of the number of rows and their layout for `repr`."""
        padding = int((self._raw["is_padding"] != 0).sum())
        rows = f"{len(self)} rows{f', {padding} of them padding' if padding else ''}"
        if (sequences := self._raw.get("sequences")) is None:
            return rows
        shape = "packed" if self.is_packed else "padded to"
        return f"{rows}, {shape} {sequences.shape[-1]} tokens"

    def __len__(self) -> int:
        """Return the number of rows, including padding rows."""
        return len(self._raw["row"])

    def __contains__(self, name: object) -> bool:
        return name in self._raw

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a converted tensor. Raises KeyError that names the existing tensors."""
        if name not in self._converted:
            if name not in self._raw:
                raise KeyError(f"no tensor {name!r}; expected one of {', '.join(sorted(self._raw))}")
            self._converted[name] = self._convert(name, self._raw[name], self._copies.get(name))
        return self._converted[name]

    @property
    def tensors(self) -> Tensors:
        """Return all converted tensors by name."""
        return {name: self[name] for name in self._raw}

    @property
    def returns(self) -> torch.Tensor:
        """Return the returns (`gae` and `reinforce++`), or for other estimators the advantages, which are equal."""
        return self["returns" if "returns" in self else "advantages"]

    @property
    def is_packed(self) -> bool:
        """Return whether the rows are concatenated on one token axis with `cu_seqlens`, instead of padded."""
        return "cu_seqlens" in self._raw

    @property
    def is_tree(self) -> bool:
        """Return whether the rows share one token axis, on which the tokens of a common prefix occur only once."""
        return "parents" in self._raw

    @property
    def is_cut(self) -> bool:
        """Return whether these are the tokens of one context-parallel rank, which are a part of the rows' tokens."""
        return "query_positions" in self._raw

    @cached_property
    def tree(self) -> TokenTree:
        """Return the tree that defines which token attends to which. Raises FailedPreconditionError without a tree."""
        if not self.is_tree:
            raise FailedPreconditionError("these rows have no tree; use a micro-batch of layout: prefix_tree")
        # Tensors that are read element by element stay in host memory.
        return TokenTree(
            self["parents"],
            self._raw["segment_starts"],
            self._raw["segment_parents"],
            self._raw["row_ends"],
            self["query_positions"] if self.is_cut else None,
        )

    @property
    def row_edges(self) -> torch.Tensor | None:
        """Return where each row's own tokens begin on the token axis, and the end of the last; (rows + 1,), or None for
        padded rows. In a tree, tokens that a row shares with an earlier one belong to the earlier row. Padding after
        a row belongs to one of its neighbors. Raises FailedPreconditionError for a context-parallel rank."""
        self._check_whole()
        if self.is_tree:
            return torch.nn.functional.pad(self["row_ends"] + 1, (1, 0))
        return self["cu_seqlens_padded" if "cu_seqlens_padded" in self else "cu_seqlens"] if self.is_packed else None

    def given(self, name: str) -> torch.Tensor:
        """Return where a column has a value that a step sent, and not `fill`; bool. For a partial column by token, in
        the shape of its tensor without that of a value. For another column that is not required by row, (rows,).

        Raises KeyError for an unknown name, and InvalidArgumentError for a column without this information.

            routes = micro["routed_experts"][micro.given("routed_experts")]   # (tokens, layers, top_k)
        """
        if (pieces := f"{name}_pieces") in self._raw:
            return given_of(self[pieces], self._raw[name], 1 if self.is_packed or self.is_tree else 2)
        if name in self._raw and (of_rows := f"{name}_given") in self._raw:
            return self[of_rows] != 0
        raise InvalidArgumentError(
            f"{name} of shape {tuple(self[name].shape)} does not record which values steps sent; declare the column "
            "with partial: true or required: false. If it has any number of values per token, use its offsets"
        )

    def position_ids(self) -> torch.Tensor:
        """Return each token's position in its row; int64, in the shape of `sequences`. 0 on padding."""
        if self.is_packed or self.is_tree:
            return self["position_ids"].long()
        return (self["attention_mask"].long().cumsum(-1) - 1).clamp_(min=0)

    def logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """Compute the log-probability of each token of the response tensors, in the shape of `advantages`.

        logits: the output of a causal model, in the shape of `sequences` plus the vocabulary as last dimension, in any
        layout. Differentiable. Does not store the log-softmax. Values outside of `response_mask` are undefined.

            logprobs = micro.logprobs(model(micro["sequences"], position_ids=micro.position_ids()))
            loss = -(logprobs * micro["advantages"] * micro["loss_mask"]).sum()
        """
        self._check_shape(logits, "logits", tuple(self["sequences"].shape))
        if self.is_cut:
            return _label_logprobs(self.at_responses(logits), self["labels"])
        if self.is_tree:
            return self.tree.logprobs(logits, self["sequences"])
        return self.at_responses(_next_logprobs(logits, self["sequences"]))

    def at_responses(self, output: torch.Tensor) -> torch.Tensor:
        """Select, for each token of the response tensors, the model's output at the previous token, where a causal
        model predicts the token: an entropy, a critic's value, a log-probability of the next token.

        output: in the shape of `sequences`; further dimensions may follow. Returns a tensor in the shape of
        `advantages` plus the further dimensions. In the padded layout, this is `output[:, -max_response - 1 : -1]`. In
        the packed layout, values move one token to the right, and the first is 0. In a tree, each token gets the output
        of its parent. Values outside of `response_mask` are undefined.

        For a context-parallel rank, the tensors of responses are already where their tokens are predicted: `output` is
        returned unchanged, or in a tree once for each of the tokens that follow.
        """
        self._check_shape(output, "output", tuple(self["sequences"].shape))
        if self.is_cut:
            return output[self["label_queries"].long()] if self.is_tree else output
        if self.is_tree:
            return self.tree.at_parents(output)
        if self.is_packed:
            return torch.cat([torch.zeros_like(output[:1]), output[:-1]])
        response = self["response_mask"].shape[1]
        if response < output.shape[1]:
            return output[:, -response - 1 : -1]
        # No column precedes the response, so no row has a prompt there, and the value is not needed.
        return torch.cat([torch.zeros_like(output[:, :1]), output[:, :-1]], dim=1)

    def unpad(self, output: torch.Tensor) -> list[torch.Tensor]:
        """Split per-token output into the responses of the rows: the last `response_len` tokens of each.

        output: (rows, width, ...), right-aligned like `response_mask`, at least as wide as the longest response, for
            example max_response or max_total. Packed or in a tree: (tokens, ...).
        Returns one tensor per row, which is empty for padding rows: a view, or a copy for a tree. Raises
        InvalidArgumentError that names both shapes.

            old = micro.unpad(micro.logprobs(logits))     # old[i]: the logprobs of row i's response
        """
        self._check_whole()
        if self.is_tree:
            self._check_shape(output, "output", tuple(self["sequences"].shape))
            paths = [self.tree.path(row) for row in range(len(self))]
            lengths = self.metadata["response_lengths"]
            return [output[path[len(path) - length :]] for path, length in zip(paths, lengths, strict=True)]
        if self.is_packed:
            self._check_shape(output, "output", tuple(self["sequences"].shape))
            mask = self._raw["response_mask"] != 0
            begins, lengths = (each.tolist() for each in row_spans(self))
            ends = list(map(add, begins, lengths))
            responses = [int(mask[begin:end].sum()) for begin, end in zip(begins, ends, strict=True)]
            return [output[end - length : end] for end, length in zip(ends, responses, strict=True)]
        lengths = (self._raw["response_mask"] != 0).sum(-1).tolist()
        self._check_shape(output, "output", (len(self),))
        width = output.shape[1] if output.ndim > 1 else 0
        if width < max(lengths):
            raise InvalidArgumentError(
                f"output has shape {tuple(output.shape)}, but the longest response has {max(lengths)} tokens; pass the "
                "whole width"
            )
        # Do not use [-length:], which is the whole row for a length of 0.
        return [row[width - length :] for row, length in zip(output, lengths, strict=True)]

    def jagged(self, name: str, part: Part = "row") -> Jagged:
        """Remove the padding from a per-token tensor. Return the values of all rows in order, and the rows' offsets.

        name: for example `sequences`, `advantages`, `position_ids`, or a column of scope `token` or `response`.
        part: the part of each row to return: all its tokens, its prompt, or its response. In the padded layout, tensors
            of responses have no other part. In the packed layout, they are 0, or the column's `fill`, on prompts.
        The response of a padding row is its last token (although `response_mask` is 0 there), so that no row is empty.
        Raises KeyError for an unknown name. Raises InvalidArgumentError if the tensor is not per token, if it does not
        have the part, or if rows share tokens (`layout: prefix_tree`).

            input_ids = shard.jagged("sequences").nested()                    # torch.nested, layout torch.jagged
            advantages = shard.jagged("advantages", "response").nested()
        """
        self._check_whole()
        return jagged(self, name, part)

    def _check_whole(self) -> None:
        if self.is_cut:
            raise FailedPreconditionError(
                f"cp_rank {self.metadata['cp_rank']} has only a part of each row's tokens; gather outputs by "
                "label_positions, or open the whole shard without cp_rank"
            )

    @staticmethod
    def _check_shape(values: torch.Tensor, name: str, expected: tuple[int, ...]) -> None:
        if tuple(values.shape[: len(expected)]) != expected:
            raise InvalidArgumentError(
                f"{name} has shape {tuple(values.shape)}; expected {expected}, and optionally further axes"
            )


class MicroBatch(Rows):
    """The rows of one forward pass of the model, returned by `Shard.micro_batches`."""

    @property
    def partition(self) -> str:
        """Return the partition of the rows, which is the same on all ranks; "" for rows without one."""
        return str(self.metadata.get("partitions", [""])[0])


class Shard(Rows):
    """One rank's rows of one mini-batch, returned by `Batch`.

    position: the mini-batch's position in the training order. is_mapped: whether the tensors are in shared memory.
    is_forward: whether columns that trainers must write, and tensors that depend on them, are still missing.
    """

    def __init__(
        self,
        tensors: Tensors,
        metadata: dict[str, Any],
        convert: Conversion,
        position: Position,
        *,
        is_mapped: bool,
        ack: Callable[[], None] | None = None,
        copies: Copies | None = None,
        is_forward: bool = False,
    ) -> None:
        super().__init__(tensors, metadata, convert, copies)
        self.position = position
        self.is_mapped, self.is_forward = is_mapped, is_forward
        self._ack = ack

    def __repr__(self) -> str:
        count = len(self.metadata["micro_batches"])
        kind = "forward " if self.is_forward else ""
        cp_rank = f" cp_rank {self.metadata['cp_rank']}" if "cp_rank" in self.metadata else ""
        return (
            f"<Shard {self.position} rank {self.metadata['rank']}{cp_rank}: {kind}{self._size()}, "
            f"{count} micro-batch{'es' * (count != 1)}>"
        )

    @property
    def is_per_micro_batch(self) -> bool:
        """Return whether each micro-batch has its own tensors (packed, or padded to its own longest row)."""
        return "sequences" not in self._raw

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Yield the shard's micro-batches in order, as views. All ranks have the same number of micro-batches."""
        shared, by_prefix = self._by_micro_batch()
        rows_of_each = self.metadata["micro_batches"]
        # Rows are in micro-batch order, so a micro-batch is a slice. One split takes half the time of many slices.
        with_items, sizes = _with_items(shared), [len(rows) for rows in rows_of_each]
        partial = [name for name in shared if f"{name}_pieces" in shared]
        others = with_items.keys() | {f"{name}_pieces" for name in partial}
        slices = {name: raw.split_with_sizes(sizes) for name, raw in shared.items() if name not in others}
        for index, rows in enumerate(rows_of_each):
            begin, end = rows[0], rows[-1] + 1
            prefix = f"micro_batch_{index:03d}"
            separate = by_prefix.get(prefix, {})
            cut = {name: of_micro_batches[index] for name, of_micro_batches in slices.items()}
            copies = {name: self._copies[name].rows(begin, end) for name in cut if name in self._copies}
            copies |= {
                name: self._copies[f"{prefix}/{name}"] for name in separate if f"{prefix}/{name}" in self._copies
            }
            pieces = {
                f"{name}_pieces": pieces_between(shared[f"{name}_pieces"], shared[name], begin, end) for name in partial
            }
            tensors = cut | pieces | _items(with_items, begin, end, len(self)) | separate
            metadata = _metadata_of(self.metadata, begin, end)
            if "partitions" in metadata:
                metadata["partitions"] = metadata["partitions"][index : index + 1]
            yield MicroBatch(tensors, metadata, self._convert, copies)

    def _by_micro_batch(self) -> tuple[Tensors, dict[str, Tensors]]:
        """Return the tensors of the whole shard, and the tensors of single micro-batches by prefix."""
        shared: Tensors = {}
        by_prefix: dict[str, Tensors] = {}
        for path, raw in self._raw.items():
            prefix, _, name = path.rpartition("/")
            (by_prefix.setdefault(prefix, {}) if prefix else shared)[name] = raw
        return shared, by_prefix

    def jagged(self, name: str, part: Part = "row") -> Jagged:
        """Remove the padding like `Rows.jagged`, also if each micro-batch has its own tensors."""
        if self.is_per_micro_batch:
            return join_jagged(micro.jagged(name, part) for micro in self.micro_batches())
        return super().jagged(name, part)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._raw and self.is_per_micro_batch and f"micro_batch_000/{name}" in self._raw:
            raise KeyError(f"this shard has a {name!r} per micro-batch; read it from micro_batches()")
        return super().__getitem__(name)

    def ack(self) -> None:
        """Acknowledge the mini-batch after its optimizer step, so that the rank continues with the next.

        Idempotent. Without checkpoints (`auto_commit`), this also commits: the service frees earlier mini-batches after
        every rank has acknowledged them, and a crash then loses their optimizer steps. Acknowledge mini-batches in
        order: a later one raises FailedPreconditionError. Raises StaleIncarnationError if another start of the trainer
        has taken over.
        """
        if self._ack is None:
            raise FailedPreconditionError(
                f"{self.position}: this shard was not read in training order; acknowledge shards of mini_batches()"
            )
        self._ack()


class MiniBatch:
    """The shards of one mini-batch, returned by the `Batch` of a client with several ranks.

    position: the mini-batch's position in the training order. shards: by rank, in the order of ranks.
    """

    def __init__(self, position: Position, shards: Mapping[int, Shard], ack: Callable[[], None] | None = None) -> None:
        self.position, self.shards = position, shards
        self._ack = ack

    def __repr__(self) -> str:
        rows = sum(map(len, self.shards.values()))
        return f"<MiniBatch {self.position}: {rows} rows in the shards of {len(self.shards)} ranks>"

    def ack(self) -> None:
        """Acknowledge the mini-batch for all of its ranks. See `Shard.ack`."""
        if self._ack is None:
            raise FailedPreconditionError(
                f"{self.position}: these shards were not read in training order; acknowledge shards of mini_batches(), "
                "or the batch"
            )
        self._ack()


def _next_logprobs(logits: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """Compute the log-probability of the next token at each position; 0 at the last. For padded and packed rows."""
    following = sequences[..., 1:].long().unsqueeze(-1)
    chosen = logits[..., :-1, :].gather(-1, following).squeeze(-1)
    known = chosen - logits[..., :-1, :].logsumexp(-1)
    return torch.nn.functional.pad(known, (0, 1))


def _label_logprobs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compute the log-probability of each label; 0 where there is none."""
    chosen = logits.gather(-1, labels.clamp(min=0).long().unsqueeze(-1)).squeeze(-1)
    return (chosen - logits.logsumexp(-1)).masked_fill(labels < 0, 0)


def load_shard(
    path: str | os.PathLike[str],
    *,
    cp_rank: int | None = None,
    device: torch.device | str | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> Shard:
    """Map a shard file, for example one written by `gristmill batch`. The shard cannot be acknowledged.

    cp_rank: the context-parallel rank whose part of the shard to return; None: the whole shard.

    Raises OSError if the file cannot be read, and InvalidArgumentError if it is not a whole shard.

        for micro in load_shard("shards/batch-00000/policy-000/rank-000.safetensors").micro_batches():
            train(micro["sequences"], micro["attention_mask"], micro.position_ids())
    """
    tensors, metadata = map_shard(os.fspath(path))
    if cp_rank is not None:
        tensors, metadata = cut_shard(tensors, metadata, cp_rank)
    convert = Conversion(device, dtypes)
    convert.check(name.rpartition("/")[2] for name in tensors)
    position = Position(metadata["batch"], 0, metadata["mini_batch"])
    return Shard(tensors, metadata, convert, position, is_mapped=cp_rank is None)


def _with_items(tensors: Tensors) -> Tensors:
    """Select the columns of scope `items` and the ragged columns, with their offsets."""
    columns: Tensors = {}
    for name, items in tensors.items():
        if (offsets := tensors.get(f"{name}_offsets")) is not None and offsets.dtype == torch.int64:
            columns |= {name: items, f"{name}_offsets": offsets}
    return columns


def _items(tensors: Tensors, begin: int, end: int, rows: int) -> Tensors:
    """Slice these columns to the rows `begin:end`. rows: the number of all rows, which have equally many offsets."""
    columns: Tensors = {}
    for name, items in tensors.items():
        if (of_cells := tensors.get(f"{name}_offsets")) is not None:
            of_row = (len(of_cells) - 1) // rows
            offsets = of_cells[of_row * begin : of_row * end + 1]
            columns[name] = items[int(offsets[0]) : int(offsets[-1])]
            columns[f"{name}_offsets"] = offsets - offsets[0]
    return columns


def _metadata_of(metadata: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    """Slice lists with one value per row to these rows. Keep all other metadata."""
    return {
        name: value[begin:end]
        if name in _OF_ROWS
        else _metadata_of(value, begin, end)
        if isinstance(value, dict)
        else value
        for name, value in metadata.items()
    }
