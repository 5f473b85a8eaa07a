"""A step as it is kept until the service has it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gristmill.completions import Sampled
from gristmill.errors import InvalidArgumentError
from gristmill_recorder.names import TrajectoryName


@dataclass(slots=True)
class Row:
    """prompt, response: int32 token ids. logprobs: float32, one a token of the response, None where rows have none.
    reward: None is pending. is_last: whether the trajectory ends with it."""

    step: int
    prompt: NDArray[np.int32]
    response: NDArray[np.int32]
    logprobs: NDArray[np.float32] | None
    stop_reason: str
    policy_version: int
    reward: float | None = 0.0
    is_last: bool = False

    @classmethod
    def of(cls, choice: Sampled, step: int, policy_version: int, *, has_logprobs: bool) -> Row:
        """Raises InvalidArgumentError for what are no token ids or logprobs."""
        logprobs = None
        try:
            prompt, response = _numbers("i", choice.prompt_token_ids), _numbers("i", choice.response_ids)
            if has_logprobs and choice.rollout_logprobs is not None:
                logprobs = _numbers("f", choice.rollout_logprobs)
        except (TypeError, OverflowError, struct.error) as error:
            raise InvalidArgumentError(f"the answer's token ids or logprobs are no such numbers: {error}") from None
        if not len(prompt) or min(prompt.min(), response.min()) < 0:
            raise InvalidArgumentError(
                "the answer has an empty prompt, or token ids below 0; check the engine's version"
            )
        if has_logprobs and (logprobs is None or len(logprobs) != len(response) or not np.isfinite(logprobs).all()):
            raise InvalidArgumentError(
                "the answer does not have one finite logprob a token; start the recorder with --no-logprobs if the "
                "engine gives none"
            )
        return cls(step, prompt, response, logprobs, choice.stop_reason, policy_version)

    @property
    def nbytes(self) -> int:
        logprobs = 0 if self.logprobs is None else self.logprobs.nbytes
        return int(self.prompt.nbytes + self.response.nbytes + logprobs)

    def shared(self, prompt: NDArray[np.int32]) -> int:
        """How many tokens a later prompt begins with that this step's prompt and response begin with, too."""
        own = _common(self.prompt, prompt)
        return own if own < len(self.prompt) else own + _common(self.response, prompt[own:])

    def fields(self, name: TrajectoryName) -> dict[str, Any]:
        """With the names of a rollouts file. What the assistant said is trained; all else stands in the prompt."""
        found = {
            "uid": name.uid,
            "round": name.round,
            "sample": name.sample,
            "attempt": name.attempt,
            "step": self.step,
            "is_last_step": self.is_last,
            "prompt_token_ids": self.prompt,
            "response_ids": self.response,
            "loss_mask": np.ones(len(self.response), np.uint8),
            "reward": self.reward,
            "stop_reason": self.stop_reason,
            "policy_version": self.policy_version,
        }
        return found if self.logprobs is None else {**found, "rollout_logprobs": self.logprobs}


def _numbers(code: str, values: Sequence[float]) -> NDArray[Any]:
    """code: "i" of int32, "f" of float32. Raises struct.error and OverflowError for what is none, where numpy would cut
    a 1.5 to a 1."""
    return np.frombuffer(struct.pack(f"{len(values)}{code}", *values), np.dtype(code))


def _common(first: NDArray[np.int32], second: NDArray[np.int32]) -> int:
    """The number of tokens that both begin with."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length
