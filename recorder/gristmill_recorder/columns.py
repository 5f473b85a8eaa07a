"""Columns that rows get from an answer, by the setting `columns`. The run must declare them."""

from __future__ import annotations

import io
from base64 import b64decode
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from gristmill.completions import Sampled
from gristmill.errors import InvalidArgumentError
from gristmill_recorder.languages.sampling import Sampling

Columns = dict[str, NDArray[Any]]


class Source(NamedTuple):
    """One choice of an answer. choice: as the engine sent it, without its tokens; a streamed one has only its message
    and its end. turn: the messages of the call that are new, and the step that they follow. images: the URLs of all
    images of the call."""

    choice: Mapping[str, Any]
    sample: Sampled
    sampling: Sampling
    turn: Mapping[str, Any]
    images: Sequence[str] = ()


def names_of(setting: str) -> list[str]:
    """Returns the columns that the setting `columns` names."""
    return [name for name in setting.split(",") if name]


def columns_of(names: Collection[str], source: Source) -> Columns:
    """Returns the columns that the answer has values for. Raises InvalidArgumentError if they cannot be read."""
    columns: Columns = {}
    for name in sorted(names):
        columns |= _READERS[name](source)
    return columns


def _conversation(source: Source) -> Columns:
    choice = source.choice
    answer = choice.get("message") or {"role": "assistant", "content": choice.get("text")}
    return {"conversation": _line({**source.turn, "answer": answer, "stop_reason": source.sample.stop_reason})}


def _sampling(source: Source) -> Columns:
    return {"sampling": _line(source.sampling.settings)}


def _sampling_mask(source: Source) -> Columns:
    mask = source.sample.sampling_mask
    if mask is None:
        return {}
    offsets = [0, *accumulate(map(len, mask))]
    values = [token for tokens in mask for token in tokens]
    return {"sampling_mask": np.array(values, np.int32), "sampling_mask_offsets": np.array(offsets, np.int64)}


def _routed_experts(source: Source) -> Columns:
    """Reads vLLM's experts: an array `(tokens, layers, top_k)` of all tokens but the last, or of the newest of them."""
    if (text := source.choice.get("routed_experts")) is None:
        return {}
    try:
        experts = np.load(io.BytesIO(b64decode(text)), allow_pickle=False)
    except (EOFError, OSError, ValueError) as error:
        raise InvalidArgumentError(f"routed_experts cannot be read: {error}; omit it from --columns") from None
    start = len(source.sample.prompt_token_ids) + len(source.sample.response_ids) - 1 - len(experts)
    return {"routed_experts": experts, "routed_experts_start": np.array(start)}


def _prompt_logprobs(source: Source) -> Columns:
    """Reads vLLM's logprobs of a prompt: by token, for each position but the first. The response's follow, so that a
    merged row has one for each of its tokens."""
    if (positions := source.choice.get("prompt_logprobs")) is None:
        return {}
    tokens = source.sample.prompt_token_ids
    values = [of[str(token)]["logprob"] for of, token in zip(positions[1:], tokens[1:], strict=True)]
    logprobs = np.array([*values, *(source.sample.rollout_logprobs or ())], np.float32)
    return {"prompt_logprobs": logprobs, "prompt_logprobs_start": np.array(1)}


def _images(source: Source) -> Columns:
    lines = b"".join(_line({"url": url}).tobytes() for url in source.images)
    return {"images": np.frombuffer(lines, np.uint8)}


def _line(document: Mapping[str, Any]) -> NDArray[np.uint8]:
    return np.frombuffer(orjson.dumps(document) + b"\n", np.uint8)


_READERS: dict[str, Callable[[Source], Columns]] = {
    "conversation": _conversation,
    "sampling": _sampling,
    "sampling_mask": _sampling_mask,
    "routed_experts": _routed_experts,
    "prompt_logprobs": _prompt_logprobs,
    "images": _images,
}
NAMES = tuple(_READERS)
