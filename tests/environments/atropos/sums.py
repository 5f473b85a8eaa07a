"""An environment of Atropos, as its users write them: `python sums.py serve --env.rollout_server_url ...`."""

from __future__ import annotations

import itertools
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup


class Sums(BaseEnv):
    """Asks `1+1=`, `1+2=` and so on. An answer is worth 1 where it is right."""

    name = "sums"

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        return BaseEnvConfig(), [APIServerConfig()]

    async def setup(self) -> None:
        self.numbers = itertools.count(1)

    async def get_next_item(self) -> tuple[str, str]:
        number = next(self.numbers) % 9
        return f"1+{number}=", str(1 + number)

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        pass

    async def collect_trajectories(self, item: tuple[str, str]) -> tuple[ScoredDataGroup, list[Any]]:
        question, answer = item
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            answers = await managed.chat_completion(
                messages=[{"role": "user", "content": question}], n=self.config.group_size, max_tokens=4
            )
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup(
            tokens=[node.tokens for node in nodes],
            masks=[node.masked_tokens for node in nodes],
            inference_logprobs=[node.logprobs for node in nodes],
            scores=[float(choice.message.content == answer) for choice in answers.choices],
        )
        return group, []


if __name__ == "__main__":
    Sums.cli()
