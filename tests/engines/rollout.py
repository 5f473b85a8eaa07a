"""A trajectory that a recorder in front of a real engine records, and what its rows must be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.engines import tiny_model
from tests.engines.witness import Answer, Witness
from tests.on_loop import Service
from tests.recorder.recorders import Recorder, trained

MODEL = "tiny"
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is the clock?"}]
PARAMETERS = {"type": "object", "properties": {"room": {"type": "string"}}, "required": ["room"]}
TOOLS: Any = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": PARAMETERS}}]
_TOLERANCE = 1e-4


@dataclass
class Rollout:
    """A trajectory whose calls a recorder in front of an engine records. Each of its steps becomes a row."""

    run: str
    recorder: Recorder
    service: Service
    witness: Witness
    model: Any

    @property
    def url(self) -> str:
        return self.recorder.base(self.run)

    def check(self, calls: int, temperature: float = 1.0) -> None:
        """Ends the trajectory, and asserts that its rows have what the engine answered, to the last bit, and that
        logprobs are those of a forward pass.

        calls: the least number of answers. A call with a grammar has other logprobs.
        """
        answers = self.witness.answers
        assert len(answers) >= calls
        assert self.recorder.finish(self.run)["steps"] == len(answers)
        rows = trained(self.service.grpc_address, self.run)
        recorded = [(row.tokens, row.trained, row.logprobs) for row in rows]
        said = [(each.prompt + each.response, each.response, _float32(each.logprobs)) for each in answers]
        assert sorted(recorded) == sorted(said)
        plain = [answer for answer in answers if not has_grammar(answer)]
        difference, tokens = self._difference(plain, temperature), sum(len(each.response) for each in answers)
        print(f"{len(answers)} answers, {tokens} tokens, {len(plain)} without a grammar: {difference:.1e}")
        assert difference <= _TOLERANCE

    def largest_difference(self) -> float:
        """Returns the largest difference of the engine's logprobs and those of a forward pass."""
        return self._difference(self.witness.answers)

    def _difference(self, answers: list[Answer], temperature: float = 1.0) -> float:
        return max(
            abs(of_engine - of_model)
            for answer in answers
            for of_engine, of_model in zip(
                answer.logprobs,
                tiny_model.logprobs(self.model, answer.prompt, answer.response, temperature),
                strict=True,
            )
        )


def has_grammar(answer: Answer) -> bool:
    """Whether a grammar forbade tokens."""
    functions = [tool["function"] for tool in answer.request.get("tools") or ()]
    is_free = answer.request.get("tool_choice") in (None, "none", "auto")
    return not is_free or any(function.get("strict") for function in functions)


def _float32(values: list[float]) -> list[float]:
    return np.array(values, np.float32).tolist()
