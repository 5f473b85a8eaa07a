"""RolloutService over gRPC."""

from __future__ import annotations

import grpc

from gristmill._wire.codecs.submit_codec import Submission
from gristmill.v1 import rollout_pb2, rollout_pb2_grpc
from gristmill_service.api import messages
from gristmill_service.api.context import ApiContext
from gristmill_service.api.questions import ask_groups


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def BeginGroups(  # noqa: N802
        self, request: rollout_pb2.BeginGroupsRequest, context: grpc.ServicerContext
    ) -> rollout_pb2.BeginGroupsResponse:
        run = self._context.runs.get(request.run)
        question = ask_groups(
            run, request.round, request.uids, request.n_samples, request.tags, self._context.gate.quota()
        )
        return messages.admissions_to(self._context.long_poll.ask(question, request.wait_s, context))

    def SubmitRows(  # noqa: N802
        self, request: Submission, context: grpc.ServicerContext
    ) -> rollout_pb2.SubmitRowsResponse:
        # The run comes first, so that what an unknown run is sent is not decoded.
        run = self._context.runs.get(request.run)
        outcomes = messages.outcomes_to(self._context.submit(run, request.rows()))
        return rollout_pb2.SubmitRowsResponse(outcomes=outcomes)

    def SetRewards(  # noqa: N802
        self, request: rollout_pb2.SetRewardsRequest, context: grpc.ServicerContext
    ) -> rollout_pb2.SetRewardsResponse:
        rewards = [messages.reward_of(reward) for reward in request.rewards]
        return rollout_pb2.SetRewardsResponse(changed=self._context.runs.get(request.run).set_rewards(rewards))

    def AbortTrajectories(  # noqa: N802
        self, request: rollout_pb2.AbortTrajectoriesRequest, context: grpc.ServicerContext
    ) -> rollout_pb2.AbortTrajectoriesResponse:
        keys = [messages.key_of(key) for key in request.trajectories]
        changed = self._context.runs.get(request.run).abort_trajectories(keys, request.reason)
        return rollout_pb2.AbortTrajectoriesResponse(changed=changed)

    def AbortGroups(  # noqa: N802
        self, request: rollout_pb2.AbortGroupsRequest, context: grpc.ServicerContext
    ) -> rollout_pb2.AbortGroupsResponse:
        run = self._context.runs.get(request.run)
        changed = run.abort_groups(request.round, list(request.uids), request.reason)
        return rollout_pb2.AbortGroupsResponse(changed=changed)

    def SealBatch(  # noqa: N802
        self, request: rollout_pb2.SealBatchRequest, context: grpc.ServicerContext
    ) -> rollout_pb2.SealBatchResponse:
        run = self._context.runs.get(request.run)
        sealed = run.seal(request.batch if request.HasField("batch") else None)
        return rollout_pb2.SealBatchResponse(batch=sealed.batch, prompts=sealed.prompts)
