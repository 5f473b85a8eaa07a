"""The calls of the API, one function each, independent of gRPC and HTTP.

The gRPC and HTTP layers identify the caller and check its permission for the run and rank before they call these
functions. A function that may wait has the call's slot as an argument.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import structlog

from gristmill._wire.codecs import tensor_file
from gristmill._wire.codecs.row_codec import Sent
from gristmill._wire.steps import Steps, TrajectoryKey
from gristmill.errors import InvalidArgumentError, ResourceExhaustedError, TooLargeError
from gristmill_service.access import caller
from gristmill_service.api.admission import SMALL_BYTES, Slot
from gristmill_service.api.context import ApiContext
from gristmill_service.api.long_poll import Question
from gristmill_service.api.row_requests import CheckedRows, RowsCheck, RowsRequest
from gristmill_service.api.shard_columns import compressed, file_with
from gristmill_service.config import Model
from gristmill_service.monitoring.health.report import RunReport, report, reported
from gristmill_service.off_loop import finished
from gristmill_service.pipeline.scheduling.plan import ShardAddress
from gristmill_service.run import waiters
from gristmill_service.run.machine.answers import (
    Admission,
    Admissions,
    BatchAnswer,
    BatchState,
    GroupAnswer,
    Moved,
    Outcome,
    Position,
    Resumed,
    RewardUpdate,
    Sealed,
    ShardAnswer,
    Taken,
)
from gristmill_service.run.machine.decisions.resume import Checkpoint
from gristmill_service.run.machine.events import GroupKey
from gristmill_service.run.run import Run

_log = structlog.get_logger(__name__)
# Checked for each submission, because structlog would format even lines that are not written.
_logs = logging.getLogger(__name__).isEnabledFor

T = TypeVar("T")

ON_LOOP_BYTES = 64 << 10
"""A larger request is parsed in a thread: hostile ones take tens of milliseconds."""


class ShardQuery(NamedTuple):
    """The shard that a rank requests.

    position: None for the rank's next. is_forward: whether the forward shard is accepted.
    """

    model: Model
    rank: int
    position: Position | None = None
    incarnation: int = 0
    is_forward: bool = False


class ShardPieces(NamedTuple):
    """A shard to send: its file in pieces, or separate zstd frames."""

    pieces: AsyncIterator[bytes | memoryview]
    is_zstd: bool


async def of_size(nbytes: int, function: Callable[..., T], *args: Any) -> T:
    """Calls a function whose duration grows with n bytes. If n is large, calls it in the thread pool."""
    return function(*args) if nbytes <= ON_LOOP_BYTES else await asyncio.to_thread(function, *args)


# --- Runs


async def create_run(api: ApiContext, run: str, config: Mapping[str, Any]) -> tuple[list[str], bool]:
    """Returns warnings about the configuration, and whether this call created the run."""
    try:
        return await api.runs.create(run, config, api.gate.check_runs)
    except ResourceExhaustedError as error:
        api.gate.note_refusal("create_run", error, run)
        raise


async def get_run(api: ApiContext, run: str) -> RunReport:
    """Returns a run's status and health. Does not open a dormant run."""
    if (dormant := reported((await api.runs.descriptions([run])).get(run))) is not None:
        return dormant
    opened = await api.runs.get(run, is_call=False)
    return report(opened, await opened.status())


async def list_runs(api: ApiContext) -> list[str]:
    """Returns the names of the runs that the caller may see."""
    return api.gate.visible(await api.runs.names())


async def list_groups(
    api: ApiContext, run: str, round_: int, uids: Sequence[str]
) -> tuple[int, AsyncIterator[list[GroupAnswer]]]:
    """Returns the number of archived groups, and the groups with these uids; without uids all others."""
    opened = await api.runs.get(run)
    return await opened.archived(), opened.groups([GroupKey(round_, uid) for uid in uids] if uids else None)


async def finish_run(api: ApiContext, run: str) -> int:
    return await (await api.runs.get(run)).finish()


async def delete_run(api: ApiContext, run: str) -> None:
    await api.runs.delete(run)


async def announce_policy_version(api: ApiContext, run: str, version: int) -> None:
    await (await api.runs.get(run)).announce(version)


async def wait_policy_version(api: ApiContext, slot: Slot, run: str, at_least: int, wait_s: float) -> int:
    opened = await api.runs.get(run)
    question = Question(
        opened,
        lambda: waiters.version_is_reached(at_least),
        opened.policy_version,
        lambda version: version >= at_least,
    )
    return await api.long_poll.ask(question, wait_s, slot)


# --- Rollout workers


async def begin_groups(
    api: ApiContext,
    slot: Slot,
    run: str,
    round_: int,
    uids: Sequence[str],
    n_samples: Sequence[int],
    tags: Sequence[str],
    wait_s: float,
) -> Admissions:
    """Admits as many of the uids as the run has capacity for. Waits until it can admit the first uid. Does not wait for
    the caller's quota, because no event of the run changes it."""
    opened, find_quota = await api.runs.get(run), api.gate.quota()
    uids, n_samples, tags = list(uids), list(n_samples), list(tags)
    waits_for: list[int] = []

    def is_settled(answer: Admissions) -> bool:
        if not waits_for:
            waits_for.extend(index for index, one in enumerate(answer.admissions) if one is Admission.NO_ROOM)
        return not waits_for or not answer.waits or answer.admissions[waits_for[0]] is not Admission.NO_ROOM

    question = Question(
        opened,
        lambda: waiters.there_is_room(tags[waits_for[0]] if waits_for and tags else ""),
        lambda: opened.begin_groups(round_, uids, n_samples, tags, find_quota),
        is_settled,
    )
    return await api.long_poll.ask(question, wait_s, slot)


async def submit_rows(
    api: ApiContext,
    slot: Slot,
    run: str,
    nbytes: int,
    read: Callable[[Run], RowsRequest],
    in_thread: Callable[..., Awaitable[CheckedRows]] = asyncio.to_thread,
) -> Taken:
    """Submits the rows of a request.

    read: decodes the request, which has n bytes; called in a thread if n is large. The run is looked up first, so that
        a request for an unknown run is not decoded. in_thread: calls a function in a thread, for a large request.
    """
    opened = await api.runs.get(run)
    check = RowsCheck(lambda: read(opened), partial(_checked, opened, api.max_message_bytes))
    try:
        rows = check.whole() if nbytes <= SMALL_BYTES else await in_thread(check.whole)
    except InvalidArgumentError as error:
        if not check.is_by_row:
            raise
        async with slot.check_rows():
            rows = await finished(asyncio.to_thread(check.good, error))
    if rows.refused:
        opened.monitor.refused(len(rows.refused))
    taken = Taken([])
    if rows.sent is not None:
        taken = await opened.submit(*rows.sent, api.gate.quota(), by_row=rows.by_row)
        if _logs(logging.DEBUG):
            _log_submission(run, rows.sent.steps, taken.outcomes)
    answer = rows.answer(taken)
    if answer.refused:
        _log.debug("rows refused", run=run, rows=len(answer.refused), reason=str(next(iter(answer.refused.values()))))
    return answer


def _checked(run: Run, most_bytes: int, sent: Sent) -> Sent:
    if sent.prefixes is not None:
        # A request with prefixes must not need more memory than the largest request with whole rows.
        size = 4 * int(sent.steps.tokens.total + sent.prefixes.lengths.sum())
        if size > most_bytes:
            raise TooLargeError(
                f"the rows' tokens and prefixes have {size} bytes, and max_message_bytes is {most_bytes}; send fewer "
                "rows per request, or raise max_message_bytes"
            )
    return Sent(run.checked(sent), sent.prefixes)


def _log_submission(run: str, steps: Steps, outcomes: Sequence[Outcome]) -> None:
    """Logs the groups of a request. Their names connect the request's id to the log line of their batch's sealing."""
    groups = sorted({str(GroupKey(*steps.key(row)[:2])) for row in range(len(steps))})
    accepted, first = outcomes.count(Outcome.ACCEPTED), str(steps.key(0))
    _log.debug("rows submitted", run=run, rows=len(steps), accepted=accepted, first=first, groups=groups)


async def set_rewards(api: ApiContext, run: str, rewards: Sequence[RewardUpdate]) -> int:
    return await (await api.runs.get(run)).set_rewards(rewards)


async def abort_trajectories(
    api: ApiContext, run: str, trajectories: Sequence[TrajectoryKey], reason: str, attempt: int | None
) -> int:
    return await (await api.runs.get(run)).abort_trajectories(trajectories, reason, attempt)


async def abort_groups(api: ApiContext, run: str, round_: int, uids: Sequence[str], reason: str) -> int:
    return await (await api.runs.get(run)).abort_groups(round_, uids, reason)


async def seal_batch(api: ApiContext, run: str, batch: int | None) -> Sealed:
    return await (await api.runs.get(run)).seal(batch)


# --- Trainer ranks


async def get_batch(
    api: ApiContext,
    slot: Slot,
    run: str,
    batch: int,
    ranks: Sequence[int],
    trains: Model | None,
    wait_s: float,
    wanted: ShardQuery | None = None,
) -> tuple[BatchAnswer, ShardAnswer | None]:
    """Waits for a batch. Returns its state and shard. wanted: the shard to return once it is published."""
    opened = await api.runs.get(run)
    incarnation = wanted.incarnation if wanted is not None and wanted.model == trains else 0
    question = Question(
        opened,
        lambda: waiters.batch_is_settled(batch),
        lambda: opened.batch(batch, ranks, trains, incarnation),
        lambda answer: answer.state is not BatchState.PENDING,
    )
    answer = await api.long_poll.ask(question, wait_s, slot)
    if wanted is None or answer.state is not BatchState.PUBLISHED:
        return answer, None
    return answer, await opened.shard(wanted.model, wanted.rank, wanted.position, wanted.incarnation)


async def get_shard(api: ApiContext, slot: Slot, run: str, wanted: ShardQuery, wait_s: float) -> ShardAnswer:
    opened = await api.runs.get(run)
    question = Question(
        opened,
        lambda: waiters.shard_is_settled(*wanted),
        lambda: opened.shard(*wanted, waits=wait_s > 0),
        lambda answer: answer.state is not BatchState.PENDING,
    )
    return await api.long_poll.ask(question, wait_s, slot)


async def read_shard(
    api: ApiContext,
    run: str,
    batch: int,
    address: ShardAddress,
    columns: Sequence[str] | None = None,
    *,
    accepts_zstd: bool = False,
) -> ShardPieces:
    """Reads a shard. columns: the declared columns to include; None: all. Raises here or while pieces are read."""
    frames = await api.runs.read_shard_frames(run, batch, address) if accepts_zstd else None
    if frames is not None and columns is None:
        return ShardPieces(frames, is_zstd=True)
    whole = await api.runs.read_shard(run, batch, address)
    if columns is None:
        return ShardPieces(whole, is_zstd=False)
    file = file_with(columns, whole)
    return ShardPieces(compressed(file), is_zstd=True) if frames is not None else ShardPieces(file, is_zstd=False)


async def read_table(api: ApiContext, run: str, batch: int) -> bytes:
    """Returns a batch's table, as `BatchTable.encode` wrote it."""
    return (await (await api.runs.get(run)).numbers(batch)).table


async def write_columns(
    api: ApiContext,
    run: str,
    batch: int,
    mini_batch: int,
    rank: int,
    incarnation: int,
    file: bytes | memoryview,
) -> int:
    """Writes columns of a shard. file: the tensors as a safetensors file. Returns how many columns the batch is still
    missing, over all shards."""
    opened = await api.runs.get(run)
    tensors = await of_size(len(file), tensor_file.decode, file)
    return await opened.write(batch, mini_batch, rank, incarnation, tensors)


async def acknowledge(
    api: ApiContext, run: str, model: Model, rank: int, position: Position, incarnation: int, commit: bool
) -> Moved:
    alone = caller.current().rank is not None
    return await (await api.runs.get(run)).acknowledge(model, rank, position, incarnation, commit, alone=alone)


async def commit(api: ApiContext, run: str, model: Model, position: Position, incarnation: int) -> Moved:
    return await (await api.runs.get(run)).commit(model, position, incarnation, caller.current().rank)


async def resume(
    api: ApiContext,
    run: str,
    model: Model,
    checkpoint: Checkpoint,
    launch: str,
    dp_size: int = 0,
    ranks: Sequence[int] = (),
) -> Resumed:
    """Resumes a model, or only the rank of the caller's token. With `ranks`, starts these ranks at their own positions,
    and ignores the other arguments."""
    opened, rank = await api.runs.get(run), caller.current().rank
    if not ranks:
        return await opened.resume(model, checkpoint, launch, dp_size, rank)
    for one in ranks if rank is not None else ():
        api.gate.check(caller.current(), "resume", run, one)
    return await opened.begin(model, ranks)


async def export_batch(api: ApiContext, run: str, batch: int | None) -> AsyncIterator[Steps]:
    """Yields the rows of a sealed batch, or of all complete groups, in order and in several tables."""
    async for steps in (await api.runs.get(run)).export(batch):
        yield steps
