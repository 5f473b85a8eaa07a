"""A rollout worker: plays games with the newest policy and submits every turn as it is played.

Owns its copy of the policy. The service paces it: `begin_groups` waits until the trainer is near enough.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch

from experiment import RUN, SAMPLES_PER_GROUP, WORKERS, Experiment
from game import MAX_REPLY_TOKENS, Episode
from gristmill import RolloutClient
from policy import Policy, load_weights, speak

GROUPS_AT_ONCE = 8


class Worker:
    def __init__(self, experiment: Experiment, index: int, client: RolloutClient) -> None:
        self._client = client
        self._weights = experiment.weights
        self._policy = Policy()
        self._version = -1
        self._generator = torch.Generator().manual_seed(experiment.seed * WORKERS + index)
        self._secrets = dict(experiment.games[index::WORKERS])

    def work(self) -> None:
        """Play all of the worker's games, as many at once as the run has capacity for."""
        uids = list(self._secrets)
        for first in range(0, len(uids), GROUPS_AT_ONCE):
            waiting = uids[first : first + GROUPS_AT_ONCE]
            while admitted := self._client.begin_groups(waiting):
                self._refresh_policy()
                self._play(admitted)
                waiting = [uid for uid in waiting if uid not in admitted]

    def _refresh_policy(self) -> None:
        if self._client.policy_version() > self._version:
            self._version = load_weights(self._policy, self._weights)

    def _play(self, uids: list[str]) -> None:
        with ExitStack() as stack:
            games = [
                (
                    Episode(self._secrets[uid]),
                    stack.enter_context(self._client.trajectory(uid, sample, policy_version=self._version)),
                )
                for uid in uids
                for sample in range(SAMPLES_PER_GROUP)
            ]
            while games:
                contexts = [episode.context for episode, _ in games]
                replies = speak(self._policy, contexts, MAX_REPLY_TOKENS, self._generator)
                for (episode, trajectory), context, reply in zip(games, contexts, replies, strict=True):
                    turn = episode.reply(reply.tokens)
                    trajectory.step(
                        context,
                        reply.tokens,
                        rollout_logprobs=reply.logprobs,
                        reward=turn.reward,
                        stop_reason=turn.stop_reason,
                        is_last_step=turn.is_last,
                    )
                games = [(episode, trajectory) for episode, trajectory in games if not episode.done]


def work(experiment: Experiment, address: str, index: int) -> None:
    """Run the worker process. Returns when all its games are played and submitted."""
    torch.set_num_threads(1)
    with RolloutClient(address, RUN) as client:
        Worker(experiment, index, client).work()
