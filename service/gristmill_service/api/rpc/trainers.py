"""TrainerService over gRPC."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import grpc

from gristmill._wire.codecs import row_codec, tensor_file
from gristmill._wire.codecs.columns_codec import ColumnsRequest
from gristmill._wire.codecs.shard_messages import message_of
from gristmill._wire.codecs.zstd_frames import compressed_stream
from gristmill.v1 import trainer_pb2, trainer_pb2_grpc
from gristmill_service.access import caller
from gristmill_service.api import messages
from gristmill_service.api.context import ApiContext
from gristmill_service.api.questions import ask_batch, ask_shard
from gristmill_service.api.rpc.streams import Streams
from gristmill_service.api.shard_columns import file_with
from gristmill_service.pipeline.layout.shard_address import ShardAddress
from gristmill_service.run.machine.answers import BatchAnswer, BatchState, ShardAnswer
from gristmill_service.run.machine.commands.trainer_commands import Checkpoint
from gristmill_service.run.run import Run

# Large enough to be fast, small enough for clients that keep gRPC's limit of 4 MiB a message.
_PIECE_BYTES = 1 << 20
_SERVICE = trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"].full_name


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    def __init__(self, context: ApiContext, streams: Streams) -> None:
        self._context = context
        self._streams = streams
        # The plan that was told of last, and the message with it.
        self._encoded: tuple[bytes, bytes] | None = None

    def GetBatch(  # noqa: N802
        self, request: trainer_pb2.GetBatchRequest, context: grpc.ServicerContext
    ) -> bytes:
        wanted = request.shard if request.HasField("shard") else None
        if wanted is not None:
            # It is what GetShard answers, which a rank's token is bound to.
            self._context.gate.check(caller.current(), "get_shard", request.run, wanted.rank)
        run, trains = self._context.runs.get(request.run), messages.model_of(request.trains) if request.trains else None
        find_shard = None if wanted is None else _shard_of(run, request.batch, wanted)
        answer = self._context.long_poll.ask(
            ask_batch(run, request.batch, request.ranks, trains), request.wait_s, context
        )
        encoded = self._encode(answer)
        if find_shard is None or answer.state is not BatchState.PUBLISHED:
            return encoded
        shard = messages.shard_to(find_shard())
        # One message behind another is the message that has the fields of both.
        return encoded + trainer_pb2.GetBatchResponse(shard=shard).SerializeToString()

    def _encode(self, answer: BatchAnswer) -> bytes:
        """Serialized once for all ranks that are told of a batch: a plan is large, and they are answered at once."""
        if answer.state is not BatchState.PUBLISHED:
            return messages.batch_to(answer).SerializeToString()
        encoded = self._encoded
        if encoded is None or encoded[0] is not answer.plan:
            encoded = self._encoded = answer.plan, messages.batch_to(answer).SerializeToString()
        return encoded[1]

    def GetShard(  # noqa: N802
        self, request: trainer_pb2.GetShardRequest, context: grpc.ServicerContext
    ) -> trainer_pb2.GetShardResponse:
        run, model = self._context.runs.get(request.run), messages.model_of(request.model)
        position = messages.optional_position(request)
        question = ask_shard(run, model, request.rank, position, request.incarnation, is_forward=request.forward)
        return messages.shard_to(self._context.long_poll.ask(question, request.wait_s, context))

    def ReadShard(  # noqa: N802
        self, request: trainer_pb2.ReadShardRequest, context: grpc.ServicerContext
    ) -> Iterator[trainer_pb2.ReadShardResponse]:
        """As the contract says it; what `add_to_server` serves are the same messages, serialized."""
        return map(trainer_pb2.ReadShardResponse.FromString, self.read_shard(request, context))

    def read_shard(self, request: trainer_pb2.ReadShardRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        return self._streams.read(self._frames(request), context)

    def _frames(self, request: trainer_pb2.ReadShardRequest) -> Iterator[bytes]:
        address = ShardAddress(messages.model_of(request.model), request.mini_batch, request.rank)
        runs, name, batch = self._context.runs, request.run, request.batch
        frames = runs.read_shard_frames(name, batch, address) if request.accepts_zstd else None
        if frames is not None and request.chooses_columns:
            frames = compressed_stream(file_with(list(request.columns), runs.read_shard(name, batch, address)))
        if frames is not None:
            yield from (message_of(one, is_zstd=True) for one in frames)
            return
        whole = runs.read_shard(name, batch, address)
        pieces: Iterator[bytes | memoryview] = whole
        if request.chooses_columns:
            pieces = file_with(list(request.columns), whole)
        for data in pieces:
            view = memoryview(data)
            for start in range(0, len(view), _PIECE_BYTES):
                yield message_of(view[start : start + _PIECE_BYTES], is_zstd=False)

    def ExportBatch(  # noqa: N802
        self, request: trainer_pb2.ExportBatchRequest, context: grpc.ServicerContext
    ) -> Iterator[trainer_pb2.ExportBatchResponse]:
        run = self._context.runs.get(request.run)
        exported = (
            trainer_pb2.ExportBatchResponse(rows=row_codec.encode(steps)) for steps in run.export(request.batch)
        )
        return self._streams.read(exported, context)

    def WriteColumns(  # noqa: N802
        self, request: ColumnsRequest, context: grpc.ServicerContext
    ) -> trainer_pb2.WriteColumnsResponse:
        run, tensors = self._context.runs.get(request.run), tensor_file.decode(request.tensors)
        lacking = run.write(request.batch, request.mini_batch, request.rank, request.incarnation, tensors)
        return trainer_pb2.WriteColumnsResponse(lacking=lacking)

    def Acknowledge(  # noqa: N802
        self, request: trainer_pb2.AcknowledgeRequest, context: grpc.ServicerContext
    ) -> trainer_pb2.AcknowledgeResponse:
        moved = self._context.runs.get(request.run).acknowledge(
            messages.model_of(request.model),
            request.rank,
            messages.position_of(request.position),
            request.incarnation,
            request.commit,
        )
        return trainer_pb2.AcknowledgeResponse(next=messages.position_to(moved.position), generation=moved.generation)

    def Commit(  # noqa: N802
        self, request: trainer_pb2.CommitRequest, context: grpc.ServicerContext
    ) -> trainer_pb2.CommitResponse:
        moved = self._context.runs.get(request.run).commit(
            messages.model_of(request.model), messages.position_of(request.position), request.incarnation
        )
        return trainer_pb2.CommitResponse(committed=messages.position_to(moved.position), generation=moved.generation)

    def Resume(  # noqa: N802
        self, request: trainer_pb2.ResumeRequest, context: grpc.ServicerContext
    ) -> trainer_pb2.ResumeResponse:
        checkpoint = Checkpoint(
            messages.optional_position(request), request.run_id, request.generation, request.give_up_reason
        )
        resumed = self._context.runs.get(request.run).resume(
            messages.model_of(request.model), checkpoint, request.launch, messages.dp_size_of(request.dp_size)
        )
        return trainer_pb2.ResumeResponse(
            incarnation=resumed.incarnation,
            position=messages.position_to(resumed.position),
            run_id=resumed.run_id,
            generation=resumed.generation,
        )


def _shard_of(run: Run, batch: int, wanted: trainer_pb2.GetShardRequest) -> Callable[[], ShardAnswer]:
    """Finds a shard that is asked for with its batch, once that is published."""
    position = messages.position_of(wanted.position)._replace(batch=batch)
    return partial(run.shard, messages.model_of(wanted.model), wanted.rank, position, wanted.incarnation)


def add_to_server(servicer: TrainerServicer, server: grpc.Server) -> None:
    """Serves the contract, ReadShard without a message object for each piece."""
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    framed = grpc.unary_stream_rpc_method_handler(servicer.read_shard, trainer_pb2.ReadShardRequest.FromString)
    # Takes the place of the one above.
    server.add_registered_method_handlers(_SERVICE, {"ReadShard": framed})
