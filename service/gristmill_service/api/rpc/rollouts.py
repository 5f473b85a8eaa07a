"""RolloutService over gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import structlog

from gristmill._client.connection.transport import SUBMIT_ROWS
from gristmill._wire.codecs import row_codec
from gristmill._wire.codecs.submit_codec import Submission
from gristmill.v1 import rollout_pb2, rollout_pb2_grpc
from gristmill_service.api import messages
from gristmill_service.api.context import ApiContext
from gristmill_service.api.errors import refusal
from gristmill_service.api.questions import ask_groups
from gristmill_service.api.rpc.forwarding import Forwarding
from gristmill_service.api.rpc.intake import Intake
from gristmill_service.api.rpc.streams import Streams
from gristmill_service.storage.run_store import OwnedElsewhereError

_log = structlog.get_logger(__name__)


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    def __init__(self, context: ApiContext, streams: Streams, forwarding: Forwarding, intake: Intake) -> None:
        self._context, self._streams, self._forwarding, self._intake = context, streams, forwarding, intake

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

    def StreamRows(  # noqa: N802
        self, requests: Iterator[rollout_pb2.StreamRowsRequest], context: grpc.ServicerContext
    ) -> Iterator[rollout_pb2.StreamRowsResponse]:
        for request in self._streams.requests(requests, context):
            yield self._answer(request, context)

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

    def _submit(self, request: rollout_pb2.StreamRowsRequest) -> list[Any]:
        run = self._context.runs.get(request.run)
        return messages.outcomes_to(self._context.submit(run, row_codec.read(request.rows, {})))

    def _answer(
        self, request: rollout_pb2.StreamRowsRequest, context: grpc.ServicerContext
    ) -> rollout_pb2.StreamRowsResponse:
        try:
            try:
                return rollout_pb2.StreamRowsResponse(outcomes=self._submit(request))
            except OwnedElsewhereError as elsewhere:
                return self._pass_on(request, elsewhere, context)
        except grpc.RpcError as refused:
            failed = rollout_pb2.RowsError(code=refused.code().value[0], message=refused.details(), retry_after_s=1.0)
            return rollout_pb2.StreamRowsResponse(error=failed)
        except Exception as error:  # noqa: BLE001  an error answers its own request only
            told = refusal(error)
            self._intake.charge(context, told.code)
            if told.code == "INTERNAL":
                _log.error("request of a stream failed", call="StreamRows", exc_info=error)
            code, retry_after_s = told.grpc_status.value[0], told.retry_after_s or 0.0
            failed = rollout_pb2.RowsError(code=code, message=told.message, retry_after_s=retry_after_s)
            return rollout_pb2.StreamRowsResponse(error=failed)

    def _pass_on(
        self, request: rollout_pb2.StreamRowsRequest, elsewhere: OwnedElsewhereError, context: grpc.ServicerContext
    ) -> rollout_pb2.StreamRowsResponse:
        """As a call of its own: a stream's requests may be of several runs, and of several owners in turn."""
        one = rollout_pb2.SubmitRowsRequest(run=request.run, rows=request.rows)
        answer = self._forwarding.unary(SUBMIT_ROWS, one, elsewhere, context)
        return rollout_pb2.StreamRowsResponse(outcomes=rollout_pb2.SubmitRowsResponse.FromString(answer).outcomes)
