"""What TRL generated, as rows of the run: one group a prompt, whose samples may be those of several ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast

from gristmill import RolloutClient
from gristmill._client.rollout.declared_columns import Declared
from gristmill._converters.keys import Choice
from gristmill._converters.trl import TrlOutput, rewards_of
from gristmill._converters.trl_tables import TrlTables

_UNUSED = ("sampling_per_token_logps",)


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
        self._end_tokens = [token for token in end_tokens if token is not None]
        self._attempt = attempt

    def begin(self, number: int, rows: int) -> set[str]:
        """Begins the groups of a generation, in order; returns those that the run still wants: none of one that it had
        before the trainer was killed.

        number: of the generation, from 0. rows: of one rank.
        """
        groups = _groups(number, rows * self._accelerator.num_processes // self._samples)
        wanted = torch.zeros(len(groups), dtype=torch.uint8, device=self._accelerator.device)
        if self._accelerator.is_main_process:
            places = {uid: place for place, uid in enumerate(groups)}
            while admitted := self._client.begin_groups([*places]) if places else []:
                wanted[[places.pop(uid) for uid in admitted]] = 1
        return {uid for uid, is_wanted in zip(groups, broadcast(wanted).tolist(), strict=True) if is_wanted}

    def submit(
        self, number: int, wanted: set[str], output: Mapping[str, Any], rewards: torch.Tensor, version: int
    ) -> None:
        """Submits this rank's rows of the groups that are wanted.

        output: of `_generate_and_score_completions`. rewards: (rows,), float; the sums of the reward functions'.
        version: of the weights that sampled.
        """
        given = {name: value for name, value in output.items() if self._keeps_sampling_logprobs or name not in _UNUSED}
        found = TrlOutput.of(_readable(given), Choice(self._columns))
        scores = rewards_of(rewards.cpu(), found.padding.rows)
        count, first = len(scores), len(scores) * self._accelerator.process_index
        places = np.arange(first, first + count)
        uids = [_uid(number, group) for group in (places // self._samples).tolist()]

        def rows(declared: Declared) -> TrlTables:
            return TrlTables(
                found,
                declared.named(found.names),
                uids=uids,
                samples=(places % self._samples).astype(np.int32),
                rewards=scores,
                ends=self._end_tokens,
                is_wanted=np.array([uid in wanted for uid in uids]),
                policy_version=version,
                attempt=self._attempt,
            )

        self._client._submit_tables(self._columns, rows)


def _groups(number: int, count: int) -> list[str]:
    return [_uid(number, group) for group in range(count)]


def _uid(number: int, group: int) -> str:
    return f"{number}-{group}"


def _readable(output: Mapping[str, Any]) -> dict[str, Any]:
    """As NumPy reads it: in this machine's memory, without bfloat16, and with ratios that are one a sequence on each of
    its tokens."""
    found = {name: _on_cpu(value) if isinstance(value, torch.Tensor) else value for name, value in output.items()}
    if (ratio := found.get("importance_sampling_ratio")) is not None:
        found["importance_sampling_ratio"] = ratio.expand_as(found["completion_ids"])
    return found


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    found = tensor.detach().cpu()
    return found.float() if found.dtype == torch.bfloat16 else found
