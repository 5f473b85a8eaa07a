"""Rows of a shard with their tensors: cut into micro-batches, and a model's output taken back to rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from gristmill._torch.conversion import Conversion
from gristmill._torch.device_copies import Copies
from gristmill._torch.jagged import Jagged, Part, jagged
from gristmill._torch.jagged import join as join_jagged
from gristmill._torch.shard_files import Tensors, map_shard
from gristmill._torch.token_tree import TokenTree
from gristmill._wire.addresses import Position
from gristmill.errors import FailedPreconditionError, InvalidArgumentError

# Metadata with one value per row, also within loss_denominators.
_OF_ROWS = (
    *("uids", "rounds", "stop_reasons", "response_lengths"),
    *("row_tokens", "prompt_tokens", "trajectory_tokens"),
)


class Rows:
    """Rows of a shard with their tensors: a micro-batch, or a whole shard.

    Get tensors by name, as in `rows["sequences"]`: they are converted when first used, or are views of the mapped file.
    Writing to them changes only this process's data.

    metadata: the shard's, such as `uids`, `stop_reasons` and `loss_denominators`; lists with one value per row have
        the values of these rows.
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
        """Describe the number of rows and their layout, for a person."""
        padding = int((self._raw["is_padding"] != 0).sum())
        rows = f"{len(self)} rows{f', {padding} of them padding' if padding else ''}"
        if (sequences := self._raw.get("sequences")) is None:
            return rows
        shape = "packed" if self.is_packed else "padded to"
        return f"{rows}, {shape} {sequences.shape[-1]} tokens"

    def __len__(self) -> int:
        """Return the number of rows, padding rows included."""
        return len(self._raw["row"])

    def __contains__(self, name: object) -> bool:
        return name in self._raw

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a tensor, converted. Raises KeyError naming the existing tensors."""
        if name not in self._converted:
            if name not in self._raw:
                raise KeyError(f"no tensor {name!r}; there are {', '.join(sorted(self._raw))}")
            self._converted[name] = self._convert(name, self._raw[name], self._copies.get(name))
        return self._converted[name]

    @property
    def tensors(self) -> Tensors:
        """Return all tensors by name, converted."""
        return {name: self[name] for name in self._raw}

    @property
    def returns(self) -> torch.Tensor:
        """Return the returns of `gae` and `reinforce++`; for other estimators the advantages, which are the same."""
        return self["returns" if "returns" in self else "advantages"]

    @property
    def is_packed(self) -> bool:
        """Return whether the rows share one token axis, cut by `cu_seqlens`, instead of a padded line for each."""
        return "cu_seqlens" in self._raw

    @property
    def is_tree(self) -> bool:
        """Return whether the rows share one token axis that has the tokens of a common prefix only once."""
        return "parents" in self._raw

    @cached_property
    def tree(self) -> TokenTree:
        """Return the tree that says which token attends to which. Raises FailedPreconditionError if there is none."""
        if not self.is_tree:
            raise FailedPreconditionError("these rows have no tree; only micro-batches of layout: prefix_tree have one")
        # Tensors that are read number by number stay in host memory.
        return TokenTree(
            self["parents"], *(self._raw[name] for name in ("segment_starts", "segment_parents", "row_ends"))
        )

    def position_ids(self) -> torch.Tensor:
        """Return each token's position in its row; int64, shaped as `sequences`. 0 on padding, which is masked."""
        if self.is_packed or self.is_tree:
            return self["position_ids"].long()
        return (self["attention_mask"].long().cumsum(-1) - 1).clamp_(min=0)

    def logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """Compute the log-probability of each token of the response tensors, in the shape of `advantages`.

        logits: of a causal model, shaped as `sequences` with the vocabulary as last dimension. Works for every layout.
        Differentiable; the vocabulary's log-softmax is not stored. Values outside of `response_mask` mean nothing.

            logprobs = micro.logprobs(model(micro["sequences"], position_ids=micro.position_ids()))
            loss = -(logprobs * micro["advantages"] * micro["loss_mask"]).sum()
        """
        self._check_shape(logits, "logits", tuple(self["sequences"].shape))
        if self.is_tree:
            return self.tree.logprobs(logits, self["sequences"])
        return self.at_responses(_next_logprobs(logits, self["sequences"]))

    def at_responses(self, output: torch.Tensor) -> torch.Tensor:
        """Select, for each token of the response tensors, the model's output at the token before it, where a causal
        model predicts it: an entropy, a critic's value, a log-probability of the next token.

        output: shaped as `sequences`; further dimensions may follow. Returns it in the shape of `advantages`, and the
        further dimensions. Padded, this is `output[:, -max_response - 1 : -1]`; packed, each value moves one token to
        the right, and the first gets 0; in a tree each token gets its parent's output. Values outside of
        `response_mask` mean nothing.
        """
        self._check_shape(output, "output", tuple(self["sequences"].shape))
        if self.is_tree:
            return self.tree.at_parents(output)
        if self.is_packed:
            return torch.cat([torch.zeros_like(output[:1]), output[:-1]])
        response = self["response_mask"].shape[1]
        if response < output.shape[1]:
            return output[:, -response - 1 : -1]
        # Without a column before the response no row has a prompt there, so that its value is not needed.
        return torch.cat([torch.zeros_like(output[:, :1]), output[:, :-1]], dim=1)

    def unpad(self, output: torch.Tensor) -> list[torch.Tensor]:
        """Cut per-token output into each row's response: its last `response_len` tokens.

        output: (rows, width, ...), right-aligned like `response_mask`, at least as wide as the longest response, such
            as max_response or max_total; packed or a tree: (tokens, ...). Padding rows give an empty tensor.
        Returns one tensor per row: views, or copies for a tree. Raises InvalidArgumentError naming both shapes.

            old = micro.unpad(micro.logprobs(logits))     # old[i]: the logprobs of row i's response
        """
        if self.is_tree:
            self._check_shape(output, "output", tuple(self["sequences"].shape))
            paths = [self.tree.path(row) for row in range(len(self))]
            lengths = self.metadata["response_lengths"]
            return [output[path[len(path) - length :]] for path, length in zip(paths, lengths, strict=True)]
        if self.is_packed:
            self._check_shape(output, "output", tuple(self["sequences"].shape))
            edges = self._raw["cu_seqlens"].tolist()
            mask = self._raw["response_mask"] != 0
            lengths = [int(mask[start:end].sum()) for start, end in pairwise(edges)]
            return [output[end - length : end] for end, length in zip(edges[1:], lengths, strict=True)]
        lengths = (self._raw["response_mask"] != 0).sum(-1).tolist()
        self._check_shape(output, "output", (len(self),))
        width = output.shape[1] if output.ndim > 1 else 0
        if width < max(lengths):
            raise InvalidArgumentError(
                f"output has shape {tuple(output.shape)} and the longest response {max(lengths)} tokens; give its "
                "whole width"
            )
        # Not [-length:], which takes the whole row for a length of 0.
        return [row[width - length :] for row, length in zip(output, lengths, strict=True)]

    def jagged(self, name: str, part: Part = "row") -> Jagged:
        """Remove the padding from a per-token tensor: return the values of all rows in order, and the rows' offsets.

        name: such as `sequences`, `advantages`, `position_ids`, or a column of scope `token` or `response`.
        part: the part of each row to return: all its tokens, its prompt, or its response. In the padded layout, tensors
            of responses have no other part; in the packed layout they have 0, or the column's `fill`, on prompts.
        The response of a padding row is its last token, though `response_mask` is 0 there, so that no row is empty.
        Raises KeyError for an unknown name, and InvalidArgumentError for a tensor or a part without tokens, or if rows
        share tokens (`layout: prefix_tree`).

            input_ids = shard.jagged("sequences").nested()                    # torch.nested, layout torch.jagged
            advantages = shard.jagged("advantages", "response").nested()
        """
        return jagged(self, name, part)

    @staticmethod
    def _check_shape(values: torch.Tensor, name: str, expected: tuple[int, ...]) -> None:
        if tuple(values.shape[: len(expected)]) != expected:
            raise InvalidArgumentError(
                f"{name} has shape {tuple(values.shape)}; these rows need {expected}, and further axes may follow"
            )


class MicroBatch(Rows):
    """Rows that go through the model together; made by `Shard.micro_batches`."""


class Shard(Rows):
    """One rank's rows of one mini-batch; made by `Batch`.

    position: of the mini-batch in the training order. is_mapped: whether the tensors are in shared memory, not a copy.
    is_forward: whether columns that trainers have to write, and tensors that depend on them, are still missing.
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
        return (
            f"<Shard {self.position} rank {self.metadata['rank']}: {kind}{self._size()}, "
            f"{count} micro-batch{'es' * (count != 1)}>"
        )

    @property
    def is_per_micro_batch(self) -> bool:
        """Return whether each micro-batch has tensors of its own (packed, or as wide as its own longest row)."""
        return "sequences" not in self._raw

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Yield the shard's micro-batches in order, as views. Every rank has the same number of them."""
        shared, by_prefix = self._by_micro_batch()
        rows_of_each = self.metadata["micro_batches"]
        # Rows are in micro-batch order, so that a micro-batch is a slice. One split takes half the time of many slices.
        with_items, sizes = _with_items(shared), [len(rows) for rows in rows_of_each]
        slices = {name: raw.split_with_sizes(sizes) for name, raw in shared.items() if name not in with_items}
        for index, rows in enumerate(rows_of_each):
            begin, end = rows[0], rows[-1] + 1
            prefix = f"micro_batch_{index:03d}"
            separate = by_prefix.get(prefix, {})
            cut = {name: of_micro_batches[index] for name, of_micro_batches in slices.items()}
            copies = {name: self._copies[name].rows(begin, end) for name in cut if name in self._copies}
            copies |= {
                name: self._copies[f"{prefix}/{name}"] for name in separate if f"{prefix}/{name}" in self._copies
            }
            tensors = cut | _items(with_items, begin, end, len(self)) | separate
            yield MicroBatch(tensors, _metadata_of(self.metadata, begin, end), self._convert, copies)

    def _by_micro_batch(self) -> tuple[Tensors, dict[str, Tensors]]:
        """Split the tensors into those of the whole shard, and by prefix those of a single micro-batch."""
        shared: Tensors = {}
        by_prefix: dict[str, Tensors] = {}
        for path, raw in self._raw.items():
            prefix, _, name = path.rpartition("/")
            (by_prefix.setdefault(prefix, {}) if prefix else shared)[name] = raw
        return shared, by_prefix

    def jagged(self, name: str, part: Part = "row") -> Jagged:
        """Remove the padding as `Rows.jagged` does, also if each micro-batch has tensors of its own."""
        if self.is_per_micro_batch:
            return join_jagged(micro.jagged(name, part) for micro in self.micro_batches())
        return super().jagged(name, part)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._raw and self.is_per_micro_batch and f"micro_batch_000/{name}" in self._raw:
            raise KeyError(f"this shard has a {name!r} for each micro-batch; take it from micro_batches()")
        return super().__getitem__(name)

    def ack(self) -> None:
        """Acknowledge the mini-batch after its optimizer step: the rank continues with the next.

        Idempotent. Without checkpoints (`auto_commit`) this also commits: earlier mini-batches are freed once every
        rank is past them, and a crash then loses their optimizer steps. Acknowledge mini-batches in order. Raises
        FailedPreconditionError for one after the rank's next, and StaleIncarnationError if another start of the trainer
        has taken over.
        """
        if self._ack is None:
            raise FailedPreconditionError(
                f"{self.position}: this shard was read outside of the training order; acknowledge the shards of "
                "mini_batches()"
            )
        self._ack()


class MiniBatch:
    """The shards of one mini-batch; made by the `Batch` of a client of several ranks.

    position: of the mini-batch in the training order. shards: by rank, in the order of ranks.
    """

    def __init__(self, position: Position, shards: Mapping[int, Shard], ack: Callable[[], None] | None = None) -> None:
        self.position, self.shards = position, shards
        self._ack = ack

    def __repr__(self) -> str:
        rows = sum(map(len, self.shards.values()))
        return f"<MiniBatch {self.position}: {rows} rows in the shards of {len(self.shards)} ranks>"

    def ack(self) -> None:
        """Acknowledge the mini-batch for each of its ranks, as `Shard.ack` does for one."""
        if self._ack is None:
            raise FailedPreconditionError(
                f"{self.position}: these shards were read outside of the training order; acknowledge those of "
                "mini_batches(), or the batch"
            )
        self._ack()


def _next_logprobs(logits: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """Compute, at each position, the log-probability of the next token; 0 at the last position. Padded or packed."""
    following = sequences[..., 1:].long().unsqueeze(-1)
    chosen = logits[..., :-1, :].gather(-1, following).squeeze(-1)
    known = chosen - logits[..., :-1, :].logsumexp(-1)
    return torch.nn.functional.pad(known, (0, 1))


def load_shard(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> Shard:
    """Map a shard file, for instance one of `gristmill batch`. The shard cannot be acknowledged.

    Raises OSError if the file cannot be read, InvalidArgumentError if it is no whole shard.

        for micro in load_shard("shards/batch-00000/policy-000/rank-000.safetensors").micro_batches():
            train(micro["sequences"], micro["attention_mask"], micro.position_ids())
    """
    tensors, metadata = map_shard(os.fspath(path))
    convert = Conversion(device, dtypes)
    convert.check(name.rpartition("/")[2] for name in tensors)
    position = Position(metadata["batch"], 0, metadata["mini_batch"])
    return Shard(tensors, metadata, convert, position, is_mapped=True)


def _with_items(tensors: Tensors) -> Tensors:
    """Select the columns of `items` scope, and the ragged ones, and their offsets."""
    columns: Tensors = {}
    for name, items in tensors.items():
        if (offsets := tensors.get(f"{name}_offsets")) is not None and offsets.dtype == torch.int64:
            columns |= {name: items, f"{name}_offsets": offsets}
    return columns


def _items(tensors: Tensors, begin: int, end: int, rows: int) -> Tensors:
    """Cut these columns to the rows `begin:end`. rows: the number of all, each of which has equally many offsets."""
    columns: Tensors = {}
    for name, items in tensors.items():
        if (of_cells := tensors.get(f"{name}_offsets")) is not None:
            of_row = (len(of_cells) - 1) // rows
            offsets = of_cells[of_row * begin : of_row * end + 1]
            columns[name] = items[int(offsets[0]) : int(offsets[-1])]
            columns[f"{name}_offsets"] = offsets - offsets[0]
    return columns


def _metadata_of(metadata: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    """Cut lists with one value per row to these rows; keep all other metadata."""
    return {
        name: value[begin:end]
        if name in _OF_ROWS
        else _metadata_of(value, begin, end)
        if isinstance(value, dict)
        else value
        for name, value in metadata.items()
    }
