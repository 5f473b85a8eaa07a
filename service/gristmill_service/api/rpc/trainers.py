"""TrainerService over gRPC."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple, TypeVar

import grpc
from google.protobuf.message import Message

from gristmill._wire import row_codec
from gristmill._wire.shard_frames import frame
from gristmill.v1 import trainer_pb2, trainer_pb2_grpc
from gristmill_service.api import messages
from gristmill_service.api.backend import Backend, ask_batch, ask_shard
from gristmill_service.api.long_poll import Question
from gristmill_service.api.rpc.streams import Streams
from gristmill_service.pipeline.shard_address import ShardAddress

# Large enough to be fast, small enough for clients that keep gRPC's limit of 4 MiB a message.
_PIECE_BYTES = 1 << 20
_SERVICE = trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"].full_name


T = TypeVar("T")


class _Told(NamedTuple):
    """An answer, and as the message that tells it."""

    is_settled: bool
    message: bytes


def _told(question: Question[T], message_of: Callable[[T], Message], key: Hashable) -> Question[_Told]:
    """The question with its answer serialized. key: of what is asked, within the run."""

    def read() -> _Told:
        answer = question.read()
        return _Told(question.is_settled(answer), message_of(answer).SerializeToString())

    return Question(question.changes, read, lambda told: told.is_settled, key)


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    def __init__(self, backend: Backend, streams: Streams) -> None:
        self._backend = backend
        self._streams = streams

    def GetBatch(  # noqa: N802
        self, request: trainer_pb2.GetBatchRequest, context: grpc.ServicerContext
    ) -> bytes:
        """Serialized, once for all ranks that wait for the batch: a plan is large, and they are answered at once."""
        asked = ask_batch(self._backend.runs.get(request.run), request.batch)
        question = _told(asked, messages.batch_to, ("batch", request.batch))
        return self._backend.waiting.ask(question, request.wait_s, context).message

    def GetShard(  # noqa: N802
        self, request: trainer_pb2.GetShardRequest, context: grpc.ServicerContext
    ) -> bytes:
        model, position = messages.model_of(request.model), messages.optional_position(request)
        asked = ask_shard(self._backend.runs.get(request.run), model, request.rank, position, request.incarnation)
        question = _told(asked, messages.shard_to, ("shard", model, request.rank, position, request.incarnation))
        return self._backend.waiting.ask(question, request.wait_s, context).message

    def ReadShard(  # noqa: N802
        self, request: trainer_pb2.ReadShardRequest, context: grpc.ServicerContext
    ) -> Iterator[trainer_pb2.ReadShardResponse]:
        """As the contract says it; what `add_to_server` serves are the same messages, serialized."""
        return map(trainer_pb2.ReadShardResponse.FromString, self.read_shard(request, context))

    def read_shard(self, request: trainer_pb2.ReadShardRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        address = ShardAddress(messages.model_of(request.model), request.mini_batch, request.rank)
        run = self._backend.runs.shards(request.run)
        with self._streams.place():
            compact = run.read_compact_shard(request.batch, address) if request.accepts_compact else None
            pieces = run.read_shard(request.batch, address) if compact is None else compact
            for data in pieces:
                view = memoryview(data)
                for start in range(0, len(view), _PIECE_BYTES):
                    yield frame(view[start : start + _PIECE_BYTES], is_compact=compact is not None)

    def ExportBatch(  # noqa: N802
        self, request: trainer_pb2.ExportBatchRequest, context: grpc.ServicerContext
    ) -> Iterator[trainer_pb2.ExportBatchResponse]:
        run = self._backend.runs.get(request.run)
        with self._streams.place():
            for steps in run.export(request.batch):
                yield trainer_pb2.ExportBatchResponse(rows=row_codec.encode(steps))

    def Acknowledge(  # noqa: N802
        self, request: trainer_pb2.AcknowledgeRequest, context: grpc.ServicerContext
    ) -> trainer_pb2.AcknowledgeResponse:
        following = self._backend.runs.get(request.run).acknowledge(
            messages.model_of(request.model),
            request.rank,
            messages.position_of(request.position),
            request.incarnation,
            request.commit,
        )
        return trainer_pb2.AcknowledgeResponse(next=messages.position_to(following))

    def Commit(  # noqa: N802
        self, request: trainer_pb2.CommitRequest, context: grpc.ServicerContext
    ) -> trainer_pb2.CommitResponse:
        committed = self._backend.runs.get(request.run).commit(
            messages.model_of(request.model), messages.position_of(request.position), request.incarnation
        )
        return trainer_pb2.CommitResponse(committed=messages.position_to(committed))

    def Resume(  # noqa: N802
        self, request: trainer_pb2.ResumeRequest, context: grpc.ServicerContext
    ) -> trainer_pb2.ResumeResponse:
        resumed = self._backend.runs.get(request.run).resume(
            messages.model_of(request.model),
            messages.optional_position(request),
            request.launch,
            messages.dp_size_of(request.dp_size),
        )
        return trainer_pb2.ResumeResponse(
            incarnation=resumed.incarnation, position=messages.position_to(resumed.position)
        )


def add_to_server(servicer: TrainerServicer, server: grpc.Server) -> None:
    """Serves the contract, ReadShard without a message object for each piece."""
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    framed = grpc.unary_stream_rpc_method_handler(servicer.read_shard, trainer_pb2.ReadShardRequest.FromString)
    # Takes the place of the one above.
    server.add_registered_method_handlers(_SERVICE, {"ReadShard": framed})
