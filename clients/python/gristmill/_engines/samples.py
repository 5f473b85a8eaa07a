"""Check the choices of engines' answers: tokens, log-probabilities and versions of weights, on every way to a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gristmill.errors import InvalidArgumentError

_DIGITS = 10  # The digits of 2**31 - 1.
# For a token without a logprob vLLM writes this, and SGLang and llama.cpp the lowest float.
_NO_LOGPROB = -9999.0
_ROUNDING = 1e-3

HOW_TO_ASK = (
    "request them: with vLLM 0.10.2 or newer by return_token_ids and logprobs, with SGLang by "
    "return_input_ids_in_sglext, return_output_ids_in_sglext and logprobs, with Dynamo by nvext.extra_fields and "
    "logprobs"
)


class Sampled(NamedTuple):
    """One choice of an answer: the tokens that the engine read, and the tokens that it sampled.

    rollout_logprobs: one log-probability per sampled token; None if the answer has none. stop_reason: the engine's name
    for it; "" if the answer has none. policy_versions: the version of the weights that sampled each token, -1 where
    the label is not a number; None if the answer has no numeric labels. sampling_mask: the tokens from which each token
    was sampled; None if the answer has none. choice: the index of the choice in the answer.
    """

    prompt_token_ids: Sequence[int]
    response_ids: Sequence[int]
    rollout_logprobs: Sequence[float] | None
    stop_reason: str
    policy_versions: Sequence[int] | None = None
    sampling_mask: Sequence[Sequence[int]] | None = None
    choice: int = 0


def checked(
    prompt: Sequence[int] | None,
    response: Sequence[int] | None,
    logprobs: Sequence[float] | None,
    stop_reason: Any,
    where: str,
    spans: Sequence[Mapping[str, Any]] | None = None,
    mask: Sequence[Sequence[int]] | None = None,
) -> Sampled:
    """Return a choice. Raises InvalidArgumentError that names it (`where`), like `sampled`, if it is incomplete.

    spans: the versions of the weights, as the engine writes them. mask: the sampling mask.
    """
    if prompt is None or response is None:
        missing = "prompt's" if prompt is None else "response's"
        raise InvalidArgumentError(f"{where}: the answer lacks the {missing} token ids; {HOW_TO_ASK}")
    for what, values in (("logprobs", logprobs), ("lists in sampling_mask", mask)):
        if values is not None and len(values) != len(response):
            raise InvalidArgumentError(
                f"{where}: the answer has {len(values)} {what} for {len(response)} token ids; expected one per token id"
            )
    for place, logprob in enumerate(logprobs or ()):
        if not (isinstance(logprob, (int, float)) and _NO_LOGPROB < logprob < _ROUNDING):
            raise InvalidArgumentError(
                f"{where}: token {place} has the logprob {logprob!r}; expected a number of more than {_NO_LOGPROB:g}, "
                "which vLLM writes for none, and at most 0; repeat the call, or update the engine"
            )
    if not isinstance(stop_reason, str):
        raise InvalidArgumentError(f"{where}: finish_reason is {stop_reason!r}; expected a string or null")
    return Sampled(prompt, response, logprobs, stop_reason, _versions(spans, len(response), where), mask)


def _versions(spans: Sequence[Mapping[str, Any]] | None, count: int, where: str) -> list[int] | None:
    """Return the version of each sampled token, from consecutive spans `{version, start, end}`."""
    versions: list[int] = []
    for span in spans or ():
        start, end = span["start"], span["end"]
        if start != len(versions) or not start <= end <= count:
            raise InvalidArgumentError(
                f"{where}: weight_versions has a span of {start}..{end} after {len(versions)} of {count} tokens; "
                "expected consecutive spans that cover each token once"
            )
        versions += [_version(span["version"])] * (end - start)
    if spans and len(versions) != count:
        raise InvalidArgumentError(f"{where}: weight_versions covers {len(versions)} of {count} tokens; expected all")
    return versions if any(version >= 0 for version in versions) else None


def _version(label: Any) -> int:
    """Return the policy version from a label of weights; -1 if the label is not a number."""
    text = str(label)
    return int(text) if text.isascii() and text.isdecimal() and len(text) < _DIGITS else -1
