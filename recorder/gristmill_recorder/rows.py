"""A recorded step, as the journal stores it and the service gets it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gristmill.completions import Sampled
from gristmill.errors import InvalidArgumentError
from gristmill_recorder.columns import Columns
from gristmill_recorder.names import TrajectoryName


@dataclass(slots=True)
class Row:
    """A step, stored until the service has acknowledged it.

    prompt, response: int32 token ids. logprobs: float32, one per response token; None if rows have none.
    policy_versions: int32, one per response token; None if `policy_version` applies to all. reward: None while it is
    pending. is_last: whether the trajectory ends with this step. is_masked: see `Sampling`. columns: those that the run
    declares. said: the key of the conversation up to this answer, None if it is not known. is_cut: whether the answer
    has no end of turn.
    """

    step: int
    prompt: NDArray[np.int32]
    response: NDArray[np.int32]
    logprobs: NDArray[np.float32] | None
    stop_reason: str
    policy_version: int
    policy_versions: NDArray[np.int32] | None = None
    is_masked: bool = False
    columns: Columns = field(default_factory=dict)
    said: bytes | None = None
    is_cut: bool = False
    reward: float | None = 0.0
    is_last: bool = False

    @classmethod
    def of(
        cls, choice: Sampled, step: int, policy_version: int, columns: Columns, *, has_logprobs: bool, is_masked: bool
    ) -> Row:
        """Builds a step from a sample. Raises InvalidArgumentError for invalid token ids, or without logprobs.

        policy_version: the version of all tokens, unless the sample contains versions.
        """
        logprobs = versions = None
        try:
            prompt, response = _numbers("i", choice.prompt_token_ids), _numbers("i", choice.response_ids)
            if has_logprobs and choice.rollout_logprobs is not None:
                logprobs = _numbers("f", choice.rollout_logprobs)
            if choice.policy_versions is not None:
                versions = _numbers("i", choice.policy_versions)
        except (TypeError, OverflowError, struct.error) as error:
            raise InvalidArgumentError(
                f"the answer's token ids or logprobs are invalid: {error}; check --engine"
            ) from None
        if not len(prompt) or min(prompt.min(), response.min()) < 0:
            raise InvalidArgumentError(
                "the answer contains no prompt tokens, or negative token ids; check the engine's version"
            )
        if has_logprobs and logprobs is None:
            raise InvalidArgumentError(
                "the answer contains no logprobs; start the recorder with --no-logprobs if the engine returns none"
            )
        if versions is not None and (versions == versions[0]).all():
            policy_version, versions = int(versions[0]), None
        stop = choice.stop_reason
        return cls(step, prompt, response, logprobs, stop, policy_version, versions, is_masked, columns)

    @property
    def nbytes(self) -> int:
        logprobs = 0 if self.logprobs is None else self.logprobs.nbytes
        columns = sum(values.nbytes for values in self.columns.values())
        return int(self.prompt.nbytes + self.response.nbytes + logprobs + columns)

    def shared(self, prompt: NDArray[np.int32]) -> int:
        """Returns how many leading tokens a later prompt shares with this step's prompt and response."""
        common = _common(self.prompt, prompt)
        return common if common < len(self.prompt) else common + _common(self.response, prompt[common:])

    def fields(self, name: TrajectoryName) -> dict[str, Any]:
        """Returns the row to submit. The loss mask of the response is 1, or 0 if the step is masked."""
        fields = {
            "uid": name.uid,
            "round": name.round,
            "sample": name.sample,
            "attempt": name.attempt,
            "step": self.step,
            "is_last_step": self.is_last,
            "prompt_token_ids": self.prompt,
            "response_ids": self.response,
            "loss_mask": np.full(len(self.response), not self.is_masked, np.uint8),
            "reward": self.reward,
            "stop_reason": self.stop_reason,
        }
        if self.logprobs is not None:
            fields["rollout_logprobs"] = self.logprobs
        fields |= {name: values if values.ndim else int(values) for name, values in self.columns.items()}
        if self.policy_versions is None:
            return {**fields, "policy_version": self.policy_version}
        return {**fields, "policy_versions": self.policy_versions}


def _numbers(code: str, values: Sequence[float]) -> NDArray[Any]:
    """Converts values to int32 (code "i") or float32 ("f"). Raises struct.error or OverflowError for other values;
    NumPy would truncate 1.5 to 1."""
    return np.frombuffer(struct.pack(f"{len(values)}{code}", *values), np.dtype(code))


def _common(first: NDArray[np.int32], second: NDArray[np.int32]) -> int:
    """Returns the length of the common prefix of two arrays."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length
