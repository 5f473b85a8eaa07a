"""A rollout service that fails on request: replies lost after the work is done, bursts of UNAVAILABLE, full buffers.

It keeps rows as the contract says (the same row again is a duplicate, each is answered for itself), and nothing more:
what the real service does is tested with the real service.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from gristmill._wire.codecs.row_codec import decode
from gristmill.errors import GristmillError
from gristmill.v1 import rollout_pb2, rollout_pb2_grpc, rows_pb2, run_pb2, run_pb2_grpc

Fault = Callable[[grpc.ServicerContext], None]


def unavailable(context: grpc.ServicerContext) -> None:
    context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")


def refuse(error: GristmillError, pushback_ms: str | None = None) -> Fault:
    """Answers with an error, like the real service."""

    def fail(context: grpc.ServicerContext) -> None:
        trailers = [("gristmill-error", type(error).__name__)]
        if pushback_ms is not None:
            trailers.append(("grpc-retry-pushback-ms", pushback_ms))
        context.set_trailing_metadata(trailers)
        context.abort(getattr(grpc.StatusCode, error.code), str(error))

    return fail


class FaultyService(rollout_pb2_grpc.RolloutServiceServicer, run_pb2_grpc.RunServiceServicer):
    """before, after: faults of the next SubmitRows calls, before or after the rows are kept; None is no fault.

    gate: SubmitRows calls wait until it is set, and ListGroups after a part of its answer. under_way: how many wait.
    """

    def __init__(self) -> None:
        self.before: deque[Fault | None] = deque()
        self.after: deque[Fault | None] = deque()
        self.rows: dict[tuple[Any, ...], bytes] = {}
        self.arrivals: list[tuple[str, int, int]] = []
        self.calls: list[int] = []
        self.refused_uids: dict[str, GristmillError] = {}
        self.full_uids: set[str] = set()
        self.dropped_uids: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.under_way = 0
        self._lock = threading.Lock()

    def SubmitRows(
        self, request: rollout_pb2.SubmitRowsRequest, context: grpc.ServicerContext
    ) -> rollout_pb2.SubmitRowsResponse:
        with self._lock:
            self.under_way += 1
        self.entered.set()
        self.gate.wait(30)
        with self._lock:
            self.under_way -= 1
            self.calls.append(len(request.rows.uids))
            self._fail(self.before, context)
            assert request.refuse_by_row
            outcomes = self._keep(request.rows)
            self._fail(self.after, context)
            return rollout_pb2.SubmitRowsResponse(outcomes=outcomes, refused=self._refused(request.rows.uids))

    def AbortTrajectories(
        self, request: rollout_pb2.AbortTrajectoriesRequest, context: grpc.ServicerContext
    ) -> rollout_pb2.AbortTrajectoriesResponse:
        self.dropped_uids |= {key.uid for key in request.trajectories}
        self.reasons = request.reason
        return rollout_pb2.AbortTrajectoriesResponse(changed=len(request.trajectories))

    def WaitPolicyVersion(
        self, request: run_pb2.WaitPolicyVersionRequest, context: grpc.ServicerContext
    ) -> run_pb2.WaitPolicyVersionResponse:
        self._fail(self.before, context)
        return run_pb2.WaitPolicyVersionResponse(version=7)

    def ListGroups(
        self, request: run_pb2.ListGroupsRequest, context: grpc.ServicerContext
    ) -> Iterator[run_pb2.ListGroupsResponse]:
        for page in range(12):
            time.sleep(0.25)
            status = run_pb2.GroupStatus(uid=str(page), state=run_pb2.GROUP_STATE_OPEN)
            yield run_pb2.ListGroupsResponse(groups=[status])
            if page == 3:
                self.gate.wait(30)

    def SealBatch(
        self, request: rollout_pb2.SealBatchRequest, context: grpc.ServicerContext
    ) -> rollout_pb2.SealBatchResponse:
        self.calls.append(0)
        self._fail(self.before, context)
        return rollout_pb2.SealBatchResponse(batch=0, prompts=1)

    def _refused(self, uids: Iterable[str]) -> Iterator[rollout_pb2.RefusedRow]:
        for row, uid in enumerate(uids):
            if uid in self.refused_uids:
                error = self.refused_uids[uid]
                yield rollout_pb2.RefusedRow(row=row, code=error.code, type=type(error).__name__, message=str(error))
            elif uid in self.full_uids:
                yield rollout_pb2.RefusedRow(
                    row=row, code="RESOURCE_EXHAUSTED", message=f"no room for {uid}", retry_after_s=0.02
                )

    def _keep(self, rows: rows_pb2.Rows) -> list[rows_pb2.RowOutcome.ValueType]:
        table, outcomes = decode(rows), []
        for row in range(len(table)):
            key, content = (table.key(row), int(table.steps[row])), table.tokens[row].tobytes()
            if table.uids[row] in self.refused_uids.keys() | self.full_uids:
                outcomes.append(rows_pb2.ROW_OUTCOME_REFUSED)
            elif table.uids[row] in self.dropped_uids:
                outcomes.append(rows_pb2.ROW_OUTCOME_DROPPED)
            elif key in self.rows:
                assert self.rows[key] == content
                outcomes.append(rows_pb2.ROW_OUTCOME_DUPLICATE)
            else:
                self.rows[key] = content
                self.arrivals.append((table.uids[row], int(table.samples[row]), int(table.steps[row])))
                outcomes.append(rows_pb2.ROW_OUTCOME_ACCEPTED)
        return outcomes

    @staticmethod
    def _fail(faults: deque[Fault | None], context: grpc.ServicerContext) -> None:
        fault = faults.popleft() if faults else None
        if fault is not None:
            fault(context)


@contextmanager
def serving(service: FaultyService, max_message_bytes: int = 64 << 20, port: int = 0) -> Iterator[str]:
    """Serves, on a free port unless given; gives the address. Calls under way break at the end."""
    options = [("grpc.max_receive_message_length", max_message_bytes), ("grpc.so_reuseport", 0)]
    server = grpc.server(ThreadPoolExecutor(8), options=options)
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    run_pb2_grpc.add_RunServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        stopped = server.stop(None)
        service.gate.set()
        stopped.wait()
