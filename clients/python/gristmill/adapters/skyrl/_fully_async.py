"""SkyRL's fully asynchronous trainer, which samples while it trains."""

from __future__ import annotations

import asyncio
from typing import Any

from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer, GeneratedOutputGroup
from skyrl.train.generators.base import GeneratorOutput

from gristmill.adapters.skyrl._session import Part
from gristmill.adapters.skyrl._trainer import GristmillPPOTrainer


class GristmillFullyAsyncPPOTrainer(GristmillPPOTrainer, FullyAsyncRayPPOTrainer):  # type: ignore[misc]
    """`FullyAsyncRayPPOTrainer` on the batches of a run; see GristmillPPOTrainer.

    Each group has the version of the weights that sampled it. The run counts groups that are staler than SkyRL allows.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._groups: list[GeneratedOutputGroup] = []

    async def _collect_generation_mini_batch(self, generation_output_group_buffer: Any, *more: Any) -> Any:
        """Collect a mini-batch. After a restart, first collect the groups of the batches that the run stores."""
        if not self._stored:
            return await super()._collect_generation_mini_batch(generation_output_group_buffer, *more)
        chosen = _Chosen(generation_output_group_buffer, set(self._stored[0]))
        try:
            return await super()._collect_generation_mini_batch(chosen, *more)
        finally:
            chosen.give_back()

    def convert_generation_group_mini_batch_to_training_input(
        self, cur_generation_group_mini_batch: list[GeneratedOutputGroup], *more: Any
    ) -> TrainingInputBatch:
        self._groups = cur_generation_group_mini_batch
        return super().convert_generation_group_mini_batch_to_training_input(cur_generation_group_mini_batch, *more)

    def _parts(self, output: GeneratorOutput, uids: list[str]) -> list[Part]:
        return [
            Part(
                group.generator_output,
                [group.uid] * len(group.generator_output["response_ids"]),
                group.global_step_when_scheduled - 1,
            )
            for group in self._groups
        ]


class _Chosen:
    """A buffer that returns only the groups of the prompts `uids`, and stores other groups until `give_back`."""

    def __init__(self, buffer: asyncio.Queue[GeneratedOutputGroup], uids: set[str]) -> None:
        self._buffer, self._uids = buffer, uids
        self._others: list[GeneratedOutputGroup] = []

    async def get(self) -> GeneratedOutputGroup:
        while True:
            group = await self._buffer.get()
            if group.uid in self._uids:
                return group
            self._others.append(group)

    def qsize(self) -> int:
        return self._buffer.qsize() + len(self._others)

    def give_back(self) -> None:
        for group in self._others:
            self._buffer.put_nowait(group)
