"""RunService over gRPC."""

from __future__ import annotations

from collections.abc import Iterator

import grpc

import gristmill
from gristmill.v1 import run_pb2, run_pb2_grpc
from gristmill_service.api import messages
from gristmill_service.api.context import ApiContext
from gristmill_service.api.questions import ask_policy_version
from gristmill_service.monitoring.health.health import assess_run

_GROUPS_AT_ONCE = 4096


class RunServicer(run_pb2_grpc.RunServiceServicer):
    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def CreateRun(  # noqa: N802
        self, request: run_pb2.CreateRunRequest, context: grpc.ServicerContext
    ) -> run_pb2.CreateRunResponse:
        warnings, created = self._context.runs.create(request.run, messages.config_mapping(request.config_json))
        return run_pb2.CreateRunResponse(warnings=warnings, created=created)

    def GetRun(  # noqa: N802
        self, request: run_pb2.GetRunRequest, context: grpc.ServicerContext
    ) -> run_pb2.GetRunResponse:
        run = self._context.runs.get(request.run)
        return run_pb2.GetRunResponse(status=messages.status_to(run.status(), assess_run(run)))

    def GetHealth(  # noqa: N802
        self, request: run_pb2.GetHealthRequest, context: grpc.ServicerContext
    ) -> run_pb2.GetHealthResponse:
        return run_pb2.GetHealthResponse(not_ready=self._context.unhealthy_reason(), version=gristmill.__version__)

    def ListRuns(  # noqa: N802
        self, request: run_pb2.ListRunsRequest, context: grpc.ServicerContext
    ) -> run_pb2.ListRunsResponse:
        return run_pb2.ListRunsResponse(runs=self._context.gate.visible(self._context.runs.names()))

    def ListGroups(  # noqa: N802
        self, request: run_pb2.ListGroupsRequest, context: grpc.ServicerContext
    ) -> Iterator[run_pb2.ListGroupsResponse]:
        groups = self._context.runs.get(request.run).groups()
        for start in range(0, len(groups), _GROUPS_AT_ONCE):
            yield messages.groups_to(groups[start : start + _GROUPS_AT_ONCE])

    def FinishRun(  # noqa: N802
        self, request: run_pb2.FinishRunRequest, context: grpc.ServicerContext
    ) -> run_pb2.FinishRunResponse:
        return run_pb2.FinishRunResponse(batches=self._context.runs.get(request.run).finish())

    def DeleteRun(  # noqa: N802
        self, request: run_pb2.DeleteRunRequest, context: grpc.ServicerContext
    ) -> run_pb2.DeleteRunResponse:
        self._context.runs.delete(request.run)
        return run_pb2.DeleteRunResponse()

    def AnnouncePolicyVersion(  # noqa: N802
        self, request: run_pb2.AnnouncePolicyVersionRequest, context: grpc.ServicerContext
    ) -> run_pb2.AnnouncePolicyVersionResponse:
        self._context.runs.get(request.run).announce(request.version)
        return run_pb2.AnnouncePolicyVersionResponse()

    def WaitPolicyVersion(  # noqa: N802
        self, request: run_pb2.WaitPolicyVersionRequest, context: grpc.ServicerContext
    ) -> run_pb2.WaitPolicyVersionResponse:
        question = ask_policy_version(self._context.runs.get(request.run), request.at_least)
        version = self._context.long_poll.ask(question, request.wait_s, context)
        return run_pb2.WaitPolicyVersionResponse(version=version)
