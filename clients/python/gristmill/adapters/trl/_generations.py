"""What TRL generated, as rows of the run: one group a prompt, whose samples may be those of several ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast

from gristmill import RolloutClient
from gristmill.converters import from_trl

_UNUSED = ("sampling_per_token_logps",)
_TYPES = dict.fromkeys(("prompt_ids", "completion_ids"), torch.int32)
_TYPES |= dict.fromkeys(("prompt_mask", "completion_mask", "tool_mask"), torch.uint8)


class Generations:
    """Submits generations. Prompts stand together in TRL's order, over all ranks: `samples` rows of each.

    accelerator: whose processes share a generation. samples: of a prompt. columns: the run's, under TRL's names.
    keeps_sampling_logprobs: whether the loss reads the sampler's log-probabilities. end_tokens: with which a completion
    that was not cut off ends. attempt: of this start of the trainer; its rows replace those of an earlier one.
    """

    def __init__(
        self,
        client: RolloutClient,
        accelerator: Accelerator,
        *,
        samples: int,
        columns: Iterable[str],
        keeps_sampling_logprobs: bool,
        end_tokens: Iterable[int],
        attempt: int,
    ) -> None:
        self._client, self._accelerator = client, accelerator
        self._samples, self._columns = samples, tuple(columns)
        self._keeps_sampling_logprobs = keeps_sampling_logprobs
        self._end_tokens = frozenset(end_tokens)
        self._attempt = attempt

    def begin(self, number: int, rows: int) -> set[str]:
        """Begins the groups of a generation, in order; returns those that the run still wants: none of one that it had
        before the trainer was killed.

        number: of the generation, from 0. rows: of one rank.
        """
        groups = _groups(number, rows * self._accelerator.num_processes // self._samples)
        wanted = torch.zeros(len(groups), dtype=torch.uint8, device=self._accelerator.device)
        if self._accelerator.is_main_process:
            left = groups
            while admitted := self._client.begin_groups(left) if left else []:
                wanted[[groups.index(uid) for uid in admitted]] = 1
                left = [uid for uid in left if uid not in admitted]
        return {uid for uid, is_wanted in zip(groups, broadcast(wanted).tolist(), strict=True) if is_wanted}

    def submit(
        self, number: int, wanted: set[str], output: Mapping[str, Any], rewards: torch.Tensor, version: int
    ) -> None:
        """Submits this rank's rows of the groups that are wanted.

        output: of `_generate_and_score_completions`. rewards: (rows,), float; the sums of the reward functions'.
        version: of the weights that sampled.
        """
        given = {name: value for name, value in output.items() if self._keeps_sampling_logprobs or name not in _UNUSED}
        count, first = len(rewards), len(rewards) * self._accelerator.process_index
        uids = [_uid(number, (first + row) // self._samples) for row in range(count)]
        rows = from_trl(
            _compact(given),
            uids=uids,
            rewards=rewards,
            policy_version=version,
            attempt=self._attempt,
            columns=self._columns,
        )
        for place, row in enumerate(rows, first):
            row["sample"] = place % self._samples
            row["stop_reason"] = "stop" if int(row["response_ids"][-1]) in self._end_tokens else "length"
        self._client.submit_rows([row for row in rows if row["uid"] in wanted])


def _groups(number: int, count: int) -> list[str]:
    return [_uid(number, group) for group in range(count)]


def _uid(number: int, group: int) -> str:
    return f"{number}-{group}"


def _compact(output: Mapping[str, Any]) -> dict[str, Any]:
    """In the types that rows have, all rows at once, and with ratios that are one a sequence on each of its tokens."""
    found = {name: value.to(_TYPES[name]) if name in _TYPES else value for name, value in output.items()}
    if (ratio := found.get("importance_sampling_ratio")) is not None:
        found["importance_sampling_ratio"] = ratio.expand_as(found["completion_ids"])
    return found
