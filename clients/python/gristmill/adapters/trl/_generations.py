"""Submits TRL's generations. Each prompt is a group of the run; its samples may be from several ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast

from gristmill import RolloutClient
from gristmill.converters import from_trl

_UNUSED = ("sampling_per_token_logps",)


class Generations:
    """Submits generations. The rows of a prompt are adjacent in TRL's order over all ranks.

    accelerator: of the processes that share a generation. samples: the number per prompt. columns: TRL's names of the
    run's columns. keeps_sampling_logprobs: whether the loss reads the sampler's log-probabilities. end_tokens: the last
    tokens of completions that were not cut off. attempt: the number of this start of the trainer; its rows supersede
    rows of earlier starts.
    """

    def __init__(
        self,
        client: RolloutClient,
        accelerator: Accelerator,
        *,
        samples: int,
        columns: Iterable[str],
        keeps_sampling_logprobs: bool,
        end_tokens: Iterable[int | None],
        attempt: int,
    ) -> None:
        self._client, self._accelerator = client, accelerator
        self._samples, self._columns = samples, tuple(columns)
        self._left_out = () if keeps_sampling_logprobs else _UNUSED
        self._end_tokens = [token for token in end_tokens if token is not None]
        self._attempt = attempt

    def begin(self, number: int, rows: int) -> set[str]:
        """Begin the groups of a generation, in order. Return the groups to sample, without groups that the run already
        has from an earlier start of the trainer.

        number: the generation's number, from 0. rows: the number of rows of one rank.
        """
        uids = [_uid(number, group) for group in range(rows * self._accelerator.num_processes // self._samples)]
        wanted = torch.zeros(len(uids), dtype=torch.uint8, device=self._accelerator.device)
        if self._accelerator.is_main_process:
            waiting = {uid: place for place, uid in enumerate(uids)}
            while admitted := self._client.begin_groups([*waiting]) if waiting else []:
                wanted[[waiting.pop(uid) for uid in admitted]] = 1
        return {uid for uid, is_wanted in zip(uids, broadcast(wanted).tolist(), strict=True) if is_wanted}

    def submit(
        self, number: int, wanted: set[str], output: Mapping[str, Any], rewards: torch.Tensor, version: int
    ) -> None:
        """Submit this rank's rows of the wanted groups.

        output: the result of `_generate_and_score_completions`. rewards: (rows,), float; the sums of the reward
        functions. version: the version of the weights that sampled.
        """
        first = len(rewards) * self._accelerator.process_index
        places = range(first, first + len(rewards))
        rows = from_trl(
            {name: _for_numpy(name, value, output) for name, value in output.items() if name not in self._left_out},
            uids=[_uid(number, place // self._samples) for place in places],
            samples=[place % self._samples for place in places],
            rewards=rewards.cpu(),
            end_tokens=self._end_tokens,
            attempt=self._attempt,
            policy_version=version,
            columns=self._columns,
        )
        self._client.submit(row for row in rows if row["uid"] in wanted)


def _uid(number: int, group: int) -> str:
    return f"{number}-{group}"


def _for_numpy(name: str, value: Any, output: Mapping[str, Any]) -> Any:
    """Return a tensor in host memory, with bfloat16 as float32. A ratio per sequence is repeated for each token."""
    if not isinstance(value, torch.Tensor):
        return value
    if name == "importance_sampling_ratio":
        value = value.expand_as(output["completion_ids"])
    value = value.detach().cpu()
    return value.float() if value.dtype == torch.bfloat16 else value
