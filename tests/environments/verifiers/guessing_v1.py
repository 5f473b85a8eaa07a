"""A taskset of verifiers and the harness that it comes with, as its users write them: a module that exports both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import openai
import verifiers.v1 as vf

__all__ = ["GuessingTaskset", "LoopHarness"]


class GuessingData(vf.TaskData):
    answer: str


class GuessingTask(vf.Task[GuessingData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def guessed(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class GuessingTaskset(vf.Taskset[GuessingTask, vf.TasksetConfig]):
    def load(self) -> Iterable[GuessingTask]:
        for question, answer in (("1+1=", "2"), ("1+2=", "7")):
            yield GuessingTask(GuessingData(prompt=question, answer=answer), self.config.task)


class LoopHarness(vf.Harness[vf.HarnessConfig]):
    """Asks, and asks once more, in this process."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                reply = answer.choices[0].message.content
                messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "again"}]
        return vf.ProgramResult(0, "", "")
