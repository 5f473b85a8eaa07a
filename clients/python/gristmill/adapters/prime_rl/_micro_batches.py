"""Encodes prime-rl's micro-batches as in `src/prime_rl/transports/batch/types.py`.

In prime-rl 0.8.0, the file is in `transports/rollouts`. Newer versions append fields, which 0.8.0 ignores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from gristmill.adapters._core.routes import fill_routes, routes_given
from gristmill.errors import FailedPreconditionError, InvalidArgumentError
from gristmill.torch import MicroBatch as Rows
from gristmill.torch import Shard

STREAMS = ("ref_logprobs", "rl_weights", "ce_weights", "ref_kl_weights")
"""Columns of scope `response` with one number per token for prime-rl."""
TEMPERATURES = "temperatures"
ROUTED_EXPERTS = "routed_experts"
SAMPLING_MASK = "sampling_mask"
COLUMNS = (*STREAMS, TEMPERATURES, ROUTED_EXPERTS, SAMPLING_MASK)
"""The declared columns that are sent to prime-rl's trainer."""

_AGGREGATE = "all"
"""prime-rl's name for the metrics over all environments."""
_PADDING_TOKEN = 1


class RoutedExperts(msgspec.Struct, array_like=True, gc=False, omit_defaults=True):
    """The experts of each token. shape: (tokens, layers, top_k)."""

    data: bytes
    shape: list[int]
    dtype: str


class SamplingMask(msgspec.Struct, array_like=True, gc=False):
    """The token ids that the sampler kept, concatenated for all tokens, and their number per token; int32."""

    ids: bytes
    counts: bytes


class MicroBatch(msgspec.Struct, array_like=True, gc=False, omit_defaults=True):
    """The rows of one forward pass of prime-rl's model, concatenated on one token axis.

    Lists have one element per token, at the token itself. `sequence_lengths` and `seq_lens` are the rows' lengths.
    """

    input_ids: list[int]
    loss_mask: list[bool]
    advantages: list[float]
    inference_logprobs: list[float]
    position_ids: list[int]
    sequence_lengths: list[int]
    temperatures: list[float]
    env_names: list[str]
    seq_lens: list[int]
    ref_logprobs: list[float] | None = None
    routed_experts: RoutedExperts | None = None
    # For images, which are not supported.
    mm_refs: None = None
    mm_token_type_ids: None = None
    rl_weights: list[float] | None = None
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None


class MaskedMicroBatch(MicroBatch, array_like=True, gc=False, omit_defaults=True):
    """A micro-batch with the field that versions after 0.8.0 append."""

    sampling_mask: SamplingMask | None = None


@dataclass(frozen=True)
class Encoding:
    """Encodes shards as prime-rl's micro-batches.

    temperature: the sampling temperature of rows without a column `temperatures`.
    env_name: the environment of groups without a tag. The environment of other groups is their tag.
    pad_to_multiple_of: pads each micro-batch to a multiple of this number of tokens; the size of context parallelism.
    """

    temperature: float = 1.0
    env_name: str = "rollouts"
    pad_to_multiple_of: int = 1

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise InvalidArgumentError(f"temperature is {self.temperature}; set a temperature above 0")
        if self.pad_to_multiple_of < 1:
            raise InvalidArgumentError(f"pad_to_multiple_of is {self.pad_to_multiple_of}; set 1 or more")
        _check_env_name(self.env_name)

    def encode(self, shard: Shard) -> bytes:
        """Return the micro-batches of one rank's step, encoded with msgpack.

        Raises FailedPreconditionError if the shard is not packed or has no log-probabilities of the sampler, and
        InvalidArgumentError for values that prime-rl does not support.
        """
        where = f"{shard.position} rank {shard.metadata['rank']}"
        micro_batches = []
        for number, rows in enumerate(shard.micro_batches()):
            if not rows.is_packed:
                raise FailedPreconditionError(
                    f"{where}: the shard is padded, but prime-rl needs packed rows; create the run with layout: packed"
                )
            if "cu_seqlens_padded" in rows:
                raise FailedPreconditionError(
                    f"{where}: rows are padded, and prime-rl pads micro-batches itself; create the run without "
                    "pad_rows_to_multiple_of and pad_packed_to"
                )
            if "rollout_logprobs" not in rows:
                raise FailedPreconditionError(
                    f"{where}: rows have no rollout_logprobs, which prime-rl's loss needs; send them with every row"
                )
            micro_batches.append(self._micro_batch(rows, f"{where} micro-batch {number}"))
        return msgspec.msgpack.encode(micro_batches)

    def _micro_batch(self, rows: Rows, where: str) -> MicroBatch:
        edges = rows["cu_seqlens"].tolist()
        lengths = [end - begin for begin, end in pairwise(edges)]
        padding = -edges[-1] % self.pad_to_multiple_of
        lengths[-1] += padding

        def padded(values: list[Any], fill: Any) -> list[Any]:
            return values + [fill] * padding

        streams: dict[str, Any] = {name: padded(rows[name].tolist(), 0.0) for name in STREAMS if name in rows}
        masks: dict[str, Any] = {SAMPLING_MASK: _sampling_mask(rows, padding)} if SAMPLING_MASK in rows else {}
        return (MaskedMicroBatch if masks else MicroBatch)(
            input_ids=padded(rows["sequences"].tolist(), _PADDING_TOKEN),
            loss_mask=padded(rows["loss_mask"].bool().tolist(), False),
            advantages=padded(rows["advantages"].tolist(), 0.0),
            inference_logprobs=padded(rows["rollout_logprobs"].tolist(), 0.0),
            position_ids=rows["position_ids"].tolist() + list(range(padding)),
            sequence_lengths=lengths,
            temperatures=padded(self._temperatures(rows, edges, where), 1.0),
            env_names=padded(self._env_names(rows, edges), ""),
            seq_lens=list(lengths),
            routed_experts=_routed_experts(rows, padding),
            **streams,
            **masks,
        )

    def _temperatures(self, rows: Rows, edges: list[int], where: str) -> list[float]:
        """Return each token's temperature. prime-rl divides the logits at a token by the token's temperature, although
        they predict the next token. Tokens that were not sampled get the temperature of the next sampled token."""
        if TEMPERATURES not in rows:
            return [self.temperature] * edges[-1]
        column: NDArray[Any] = rows[TEMPERATURES].double().numpy()
        if len(column) == len(rows):
            column = np.repeat(column, np.diff(edges))
        sampled = rows["loss_mask"].numpy() != 0
        if not (column[sampled] > 0).all():
            raise InvalidArgumentError(
                f"{where}: {TEMPERATURES} is {column[sampled].min()} for a trained token, but must be above 0; send "
                "the temperature that sampled the token"
            )
        temperatures = np.where(column > 0, column, self.temperature)
        for begin, end in pairwise(edges):
            known = (column[begin:end] > 0).nonzero()[0]
            if known.size:
                following = known[np.searchsorted(known, np.arange(end - begin)).clip(max=known.size - 1)]
                temperatures[begin:end] = column[begin:end][following]
        values: list[float] = temperatures.tolist()
        return values

    def _env_names(self, rows: Rows, edges: list[int]) -> list[str]:
        tags = rows.metadata.get("tags", [""] * len(rows))
        padding = rows["is_padding"].tolist()
        names = ["" if is_padding else tag or self.env_name for tag, is_padding in zip(tags, padding, strict=True)]
        for name in set(names):
            _check_env_name(name)
        lengths = [end - begin for begin, end in pairwise(edges)]
        return [name for name, length in zip(names, lengths, strict=True) for _ in range(length)]


def check_columns(columns: Iterable[Mapping[str, Any]]) -> None:
    """Refuse declared columns that prime-rl would misinterpret."""
    for column in columns:
        name, scope, shape = column["name"], column["scope"], column.get("shape", ())
        if scope == "items":
            raise InvalidArgumentError(
                f"columns: {name} has scope items, like images, but prime-rl needs images in the same micro-batches on "
                "every rank, which the bridge does not support; omit the column"
            )
        form = _FORMS.get(name)
        if form is not None and (scope not in form.scopes or not form.fits(shape)):
            raise InvalidArgumentError(
                f"columns: {name} of scope {scope} and shape {list(shape)} does not fit prime-rl; declare scope "
                f"{' or '.join(form.scopes)}, and shape {form.shape}"
            )
        if name == SAMPLING_MASK and column["dtype"] not in _TOKEN_IDS:
            raise InvalidArgumentError(
                f"columns: {name} has dtype {column['dtype']}, and prime-rl reads token ids of 32 bits; declare dtype "
                "int32"
            )
        if name in _LOSS_WEIGHTS and column.get("fill", 0):
            raise InvalidArgumentError(
                f"columns: {name} has fill {column['fill']}, with which prime-rl would train prompts and padding; omit "
                "fill"
            )


class _Form(NamedTuple):
    scopes: tuple[str, ...]
    shape: str = "[]"
    axes: int = 0

    def fits(self, shape: Sequence[int | None]) -> bool:
        return len(shape) == self.axes and (None in shape) == ("null" in self.shape)


_FORMS = {
    **dict.fromkeys(STREAMS, _Form(("response",))),
    TEMPERATURES: _Form(("response", "row")),
    ROUTED_EXPERTS: _Form(("token",), "[layers, top_k]", 2),
    SAMPLING_MASK: _Form(("response",), "[null]", 1),
}
_TOKEN_IDS = ("uint8", "int8", "int16", "int32")
"""The types of ids that 32 bits hold."""
_LOSS_WEIGHTS = ("ce_weights", "ref_kl_weights")
"""The weights of losses that have no other mask."""


def _routed_experts(rows: Rows, padding: int) -> RoutedExperts | None:
    if ROUTED_EXPERTS not in rows:
        return None
    routes = rows[ROUTED_EXPERTS].clone()
    fill_routes(routes, routes_given(rows, ROUTED_EXPERTS))
    experts = routes.numpy()
    shape = [len(experts) + padding, *experts.shape[1:]]
    row_bytes = experts.itemsize * experts[:1].size
    return RoutedExperts(experts.tobytes() + bytes(padding * row_bytes), shape, experts.dtype.name)


def _sampling_mask(rows: Rows, padding: int) -> SamplingMask:
    ids = rows[SAMPLING_MASK].numpy()
    counts = np.pad(np.diff(rows[f"{SAMPLING_MASK}_offsets"].numpy()), (0, padding))
    return SamplingMask(ids.astype("<i4").tobytes(), counts.astype("<i4").tobytes())


def _check_env_name(name: str) -> None:
    if name == _AGGREGATE:
        raise InvalidArgumentError(
            f"an environment is named {name!r}, like prime-rl's metrics over all environments; choose another tag"
        )
