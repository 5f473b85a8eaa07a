"""An environment for SkyRL's generator; imported by SkyRL, where that is installed."""

from __future__ import annotations

from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class TwoTurns(BaseTextEnv):  # type: ignore[misc]
    """Answers the first turn, and scores the second."""

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__()
        self.score = extras["score"]

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        if self.turns < 2:
            answer = [{"role": "user", "content": "w40"}]
            return BaseTextEnvStepOutput(observations=answer, reward=0.0, done=False, metadata={})
        return BaseTextEnvStepOutput(observations=[], reward=self.score, done=True, metadata={})
