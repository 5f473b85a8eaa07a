"""The calls that may wait, as questions to a run."""

from __future__ import annotations

from collections.abc import Sequence

from gristmill_service.api.long_poll import Question
from gristmill_service.config import Model
from gristmill_service.run.machine.answers import Admission, Admissions, BatchAnswer, BatchState, Position, ShardAnswer
from gristmill_service.run.machine.commands.command import FindQuota
from gristmill_service.run.machine.queries import conditions
from gristmill_service.run.machine.queries.conditions import Condition
from gristmill_service.run.request_limits import check_group_count
from gristmill_service.run.run import Run


def ask_batch(run: Run, batch: int, ranks: Sequence[int], trains: Model | None) -> Question[BatchAnswer]:
    return Question(
        run,
        lambda: conditions.batch_is_settled(batch),
        lambda: run.batch(batch, ranks, trains),
        lambda answer: answer.state is not BatchState.PENDING,
    )


def ask_shard(
    run: Run, model: Model, rank: int, position: Position | None, incarnation: int, *, is_forward: bool = False
) -> Question[ShardAnswer]:
    return Question(
        run,
        lambda: conditions.shard_is_settled(model, rank, position, incarnation, is_forward=is_forward),
        lambda: run.shard(model, rank, position, incarnation, is_forward=is_forward),
        lambda answer: answer.state is not BatchState.PENDING,
    )


def ask_policy_version(run: Run, at_least: int) -> Question[int]:
    return Question(
        run,
        lambda: conditions.version_is_reached(at_least),
        run.policy_version,
        lambda version: version >= at_least,
    )


def ask_groups(
    run: Run,
    round_: int,
    uids: Sequence[str],
    n_samples: Sequence[int],
    tags: Sequence[str],
    quota: FindQuota | None,
) -> Question[Admissions]:
    """Admits the uids that there is capacity for. Settled once the first uid that got none at the first reading is
    answered, or where the caller's quota leaves none, which no event of the run changes. Raises InvalidArgumentError
    for too many uids."""
    # Before they are copied.
    check_group_count(len(uids))
    uids, n_samples, tags = list(uids), list(n_samples), list(tags)
    waits_for: list[int] = []

    def is_settled(answer: Admissions) -> bool:
        if not waits_for:
            waits_for.extend(index for index, one in enumerate(answer.admissions) if one is Admission.NO_ROOM)
        return not waits_for or not answer.waits or answer.admissions[waits_for[0]] is not Admission.NO_ROOM

    def condition() -> Condition:
        return conditions.there_is_room(tags[waits_for[0]] if waits_for and tags else "")

    return Question(run, condition, lambda: run.begin_groups(round_, uids, n_samples, tags, quota), is_settled)
