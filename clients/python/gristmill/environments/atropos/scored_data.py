"""What an environment of Atropos posts, as rows: a group of samples, each a sequence of tokens with a mask. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gristmill.errors import InvalidArgumentError, UnsupportedError

CONTEXT = -100
"""In a mask: a token that the model did not sample. Any other entry is the token itself."""

_TOKEN_COLUMNS = ("distill_token_ids", "distill_logprobs", "ref_logprobs")
_UID_DIGITS = 20

Row = dict[str, Any]


class ScoredData(msgspec.Struct):
    """One group, as `ScoredData` of `atroposlib/api/server.py` has it. What is not listed here nor there is ignored."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    advantages: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    messages: Any = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: list[list[float]] | None = None
    overrides: list[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    env_id: int | None = None
    distill_token_ids: list[list[list[int]]] | None = None
    distill_logprobs: list[list[list[float]]] | None = None

    def uid(self, env: str) -> str:
        """Names the group by what is trained of it, so that a post that is repeated is the same group."""
        content = msgspec.json.encode((self.tokens, self.masks, self.scores))
        return f"{env}/{hashlib.sha256(content).hexdigest()[:_UID_DIGITS]}"


@dataclass(frozen=True)
class Takes:
    """What the run takes. columns: the scopes of those that it declares for workers, by name. advantages: whether rows
    bring them."""

    columns: Mapping[str, str]
    advantages: bool


def rows_of(group: ScoredData, takes: Takes) -> list[Row]:
    """The group's samples as rows without uid: the prompt is what stands before the first sampled token.

    Tokens that the mask has as context within the response, of users and tools, are not trained. A sample of which
    nothing is trained, or that says `set_advantage_to_zero`, keeps its score and has a loss mask of 0.
    Raises InvalidArgumentError, and UnsupportedError for what a row cannot hold, naming sample, field and remedy.
    """
    _check_group(group, takes)
    count = len(group.tokens)
    per_token = {name: values for name in _TOKEN_COLUMNS if (values := getattr(group, name))}
    for name, values in {**per_token, "masks": group.masks, "scores": group.scores}.items():
        _check_count(name, values, count)
    optional = {
        "inference_logprobs": group.inference_logprobs,
        "advantages": group.advantages,
        "overrides": group.overrides,
    }
    for name, values in optional.items():
        if values:
            _check_count(name, values, count)
    return [_row(group, sample, per_token, takes) for sample in range(count)]


def _check_count(name: str, values: Sequence[Any], count: int) -> None:
    if len(values) != count:
        raise InvalidArgumentError(f"{name} has {len(values)} entries for {count} samples; give one each")


def _check_group(group: ScoredData, takes: Takes) -> None:
    if not group.tokens:
        raise InvalidArgumentError("tokens is empty; a group has at least one sample")
    images = group.images if isinstance(group.images, list) else [group.images]
    if any(image is not None for image in images):
        raise UnsupportedError("images are not taken; submit the rows by gristmill's client, with images as columns")
    if group.advantages and not takes.advantages:
        raise InvalidArgumentError(
            "advantages were given and the run computes them from scores; create it with advantage_estimator: none, or "
            "leave them out"
        )
    if takes.advantages and not group.advantages:
        raise InvalidArgumentError(
            "the run takes advantages (advantage_estimator: none) and none were given; create it with another estimator"
        )
    for name in _TOKEN_COLUMNS:
        if getattr(group, name) and name not in takes.columns:
            raise InvalidArgumentError(
                f"{name} were given and the run declares no column for them; create it with the column {name}, of "
                "scope token or response, or leave them out"
            )
    _check_known("group_overrides", group.group_overrides or {}, ("group_size", "temperature"))


def _check_known(name: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    if unknown := sorted(given.keys() - known):
        raise UnsupportedError(f"{name} has {unknown[0]!r}; understood are {', '.join(known)}: leave it out")


def _row(group: ScoredData, sample: int, per_token: Mapping[str, Sequence[Any]], takes: Takes) -> Row:
    where = f"sample {sample}"
    tokens, trained = _trained(group, sample, where)
    start = _response_start(trained)
    response = trained[start:]
    override = (group.overrides or [{}] * len(group.tokens))[sample]
    _check_known(f"{where}: overrides", override, ("set_advantage_to_zero", "temperature"))
    row: Row = {
        "sample": sample,
        "prompt_token_ids": tokens[:start],
        "response_ids": tokens[start:],
        "loss_mask": (response & (not override.get("set_advantage_to_zero"))).astype(np.uint8),
        "reward": group.scores[sample],
    }
    if group.inference_logprobs:
        row["rollout_logprobs"] = _of_trained("inference_logprobs", group.inference_logprobs[sample], trained, where)
    if group.advantages:
        row["advantage"] = _of_trained("advantages", group.advantages[sample], trained, where)
    for name, values in per_token.items():
        _check_length(name, values[sample], len(tokens), where)
        row[name] = values[sample] if takes.columns[name] == "token" else values[sample][start:]
    return row | _temperature(group, override, takes, where)


def _trained(group: ScoredData, sample: int, where: str) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The sample's tokens, and which of them its mask trains."""
    tokens, mask = (np.array(values[sample], np.int64) for values in (group.tokens, group.masks))
    _check_length("masks", mask, len(tokens), where)
    if len(tokens) < 2:
        raise InvalidArgumentError(f"{where}: it has {len(tokens)} tokens; a prompt and a response have one each")
    trained = mask != CONTEXT
    if (wrong := np.flatnonzero(trained & (mask != tokens))).size:
        first = wrong[0]
        raise InvalidArgumentError(
            f"{where}: masks has {mask[first]} at {first}, where the token is {tokens[first]}; give the token where it "
            f"is trained and {CONTEXT} where it is not"
        )
    return tokens, trained


def _response_start(trained: NDArray[np.bool_]) -> int:
    """The first token is always prompt, as nothing predicts it; where none is trained, the last is the response."""
    later = trained[1:]
    return 1 + int(later.argmax()) if later.any() else len(trained) - 1


def _of_trained(name: str, values: Sequence[float], trained: NDArray[np.bool_], where: str) -> NDArray[np.float64]:
    """The response's values, 0 where it is context: Atropos puts 1 there in logprobs."""
    _check_length(name, values, len(trained), where)
    start = _response_start(trained)
    return np.where(trained[start:], np.array(values, np.float64)[start:], 0.0)


def _check_length(name: str, values: Collection[Any] | NDArray[Any], length: int, where: str) -> None:
    if len(values) != length:
        raise InvalidArgumentError(f"{where}: {name} has {len(values)} entries for {length} tokens; give one each")


def _temperature(group: ScoredData, override: Mapping[str, Any], takes: Takes, where: str) -> Row:
    """What it was sampled at, for a run that declares the column; looked for in the order of Atropos' own trainer."""
    if "temperature" in takes.columns:
        found = (given["temperature"] for given in _settings(group, override) if "temperature" in given)
        return {"temperature": next(found, 1.0)}
    if "temperature" in override:
        raise InvalidArgumentError(
            f"{where}: overrides has a temperature and the run declares no column for it; create it with the column "
            "temperature, of scope row, or leave it out"
        )
    return {}


def _settings(group: ScoredData, override: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [override, group.generation_params or {}, group.group_overrides or {}]
