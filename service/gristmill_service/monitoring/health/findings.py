"""The rules of a run's health: what blocks a run, and how severe that is. docs/page.md explains them to users.

A run that waits for rollouts is healthy, as is a run whose workers wait for a trainer that trains: this is its pace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from pydantic import Field

from gristmill_service.config import Model
from gristmill_service.monitoring import Document
from gristmill_service.monitoring.health.run_facts import (
    SHOWN_GROUPS,
    AwaitingBatch,
    ModelFacts,
    OpenGroup,
    RunFacts,
    seconds,
)
from gristmill_service.run.machine.answers import Position
from gristmill_service.run.machine.state import GIVEN_UP
from gristmill_service.run.machine.status import explained

HealthState = Literal["failed", "stuck", "no trainer", "training", "collecting", "idle", "finished"]
"""The states of a run's health; docs/page.md defines them."""
STATES: tuple[HealthState, ...] = get_args(HealthState)

Level = Literal["failed", "stuck", "slow", "note"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""The levels of findings, worst first."""

# The limit for a rank that is behind others, because ranks of a model perform each step together.
LATE_RANK_S = 60.0
# The limits for all ranks of a model, as multiples of their longest step, and the assumed length before the first step.
_SLOW_STEPS, _STUCK_STEPS, _FIRST_STEP_S = 3, 10, 180.0
_SLOW_RANKS_S, _STUCK_RANKS_S = 60.0, 600.0
_BLOCKED_S = 60.0
_LONG_BUILD_S = 30.0
_SLOW_COLUMNS_S, _STUCK_COLUMNS_S = 540.0, 1800.0
_LONG_GROUP_S, _NO_ROWS_S = 300.0, 1800.0

_LONGEST_TEXT, _LONGEST_REASON = 500, 300
_NAMED_RANKS = 8
_SHOWN_DROP_REASONS = 5
_DROP_REMEDIES = {
    "zero_variance": "check the rewards, which are equal within each group, or sample prompts that some samples solve",
    "stale": "raise max_staleness, or have workers sample with the announced policy version",
    "timeout": "check the workers and their environments, or raise group_timeout_s",
    "rows_lost": "the disk or Redis lost rows that it had confirmed; see the runbook",
}


class Finding(Document):
    """Something that blocks a run, or a note.

    failed: a batch cannot be built. stuck: the run cannot continue without intervention. slow: something takes longer
    than expected, and may continue. note: who waits for whom.
    """

    level: Level
    text: str
    reason: str = Field(default="", description="Why, of a failed batch and of one from which nothing is learned.")
    remedy: str = Field(default="", description="What to do about the reason.")
    since: float | None = Field(description="Seconds since 1970; null: not known.")
    batch: int | None = Field(default=None, description="The batch that it is about.")
    mini_batch: int | None = Field(
        default=None, description="The mini-batch of that batch that the ranks have to acknowledge."
    )
    model: Model | None = None
    ranks: list[int] = Field(default=[], description="The ranks that it is about, at most 8.")
    uid: str | None = Field(
        default=None, description="The open group that it is about: the first 80 characters of its uid."
    )
    round: int | None = Field(default=None, description="The round of that group.")

    @property
    def sentence(self) -> str:
        """The text, the reason and the remedy in one sentence."""
        return "".join([self.text, self.reason and f": {self.reason}", self.remedy and f"; {self.remedy}"])


def findings_of(facts: RunFacts) -> list[Finding]:
    """Returns the findings, worst first."""
    rules = (
        _failed_batches,
        _unhealthy,
        _log,
        _ranks,
        _columns,
        _build,
        _room,
        _dropped,
        _stragglers,
        _unlearned,
        _rollbacks,
    )
    findings = [finding for rule in rules for finding in rule(facts)]
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def state_of(facts: RunFacts, findings: Sequence[Finding]) -> HealthState:
    worst = findings[0].level if findings else "note"
    if worst in ("failed", "stuck"):
        return worst
    if facts.held and not facts.has_trainer:
        return "no trainer"
    if facts.ranks_have_work or facts.building is not None or facts.awaiting is not None:
        return "training"
    if facts.has_groups:
        return "collecting"
    if facts.held:
        # All batches are trained, and the trainer has not committed them.
        return "training"
    return "finished" if facts.counts.finished else "idle"


def summary_of(facts: RunFacts, state: HealthState, findings: Sequence[Finding]) -> str:
    """Returns the state's reason, in one sentence."""
    match state:
        case "failed" | "stuck":
            return findings[0].sentence
        case "no trainer":
            return f"no trainer has called yet: {_training(facts)}"
        case "training":
            return _training(facts)
        case "collecting":
            opened = facts.counts.groups_open
            text = (
                f"{opened} {'group is' if opened == 1 else 'groups are'} open, {facts.counts.groups_complete} complete"
            )
            return f"{text}; {facts.lacking}" if facts.lacking else text
        case "idle":
            return f"no group is open{_no_room(facts) or ': no rollouts come'}"
        case "finished":
            text = f"finished, {_count(facts.counts.batches_freed - facts.counts.batches_failed, 'batch')} trained"
            incomplete = facts.counts.groups_dropped.get("finished", 0)
            return f"{text}; {_count(incomplete, 'incomplete group', 's')} dropped" if incomplete else text


def has_pulled(facts: RunFacts, model: ModelFacts, rank: int) -> bool | None:
    """Returns whether the rank requested a shard after its next batch was published; None if unknown."""
    batch, pulled = facts.history.of_batch(model.next[rank].batch), facts.history.ranks[model.model][rank].pulled
    if batch.published is None:
        return None
    if pulled is not None and pulled >= batch.published:
        return True
    return None if batch.was_published else False


def available(facts: RunFacts, model: ModelFacts, rank: int) -> float:
    """Returns since when the rank could have started its next shard: since the previous one was acknowledged, and this
    one published."""
    since = facts.history.ranks[model.model][rank].since
    return max(since, facts.history.of_batch(model.next[rank].batch).published or since)


def _training(facts: RunFacts) -> str:
    if not facts.ranks_have_work:
        if facts.building is not None:
            return f"batch {facts.building} is being built"
        if facts.awaiting is not None:
            return _awaited(facts.awaiting)
        return f"{_count(facts.held, 'batch')} trained and not committed{_no_room(facts)}"
    least, model, rank = min(
        (position, model.model, rank) for model in facts.models for rank, position in enumerate(model.next)
    )
    waits = "workers wait for the trainer: " if not facts.room.groups and not facts.counts.finished else ""
    return f"{waits}{_count(facts.held, 'batch')} not committed, {model} rank {rank} is at {_place(least)}"


def _no_room(facts: RunFacts) -> str:
    """Returns why workers cannot begin a group, as a part of a sentence; empty if they can."""
    return "" if facts.room.groups or facts.counts.finished else f"; workers wait for capacity: {facts.room.reason}"


def _failed_batches(facts: RunFacts) -> Iterator[Finding]:
    """Reports failed batches, until a later batch is trained and committed."""
    committed = min(model.committed for model in facts.models)
    for number, reason in facts.failed.items():
        since = facts.history.of_batch(number).ended
        why, remedy = explained(reason, is_kept=number in facts.kept)
        if reason.startswith(GIVEN_UP):
            yield _finding("note", f"batch {number} was {reason}", since, batch=number)
        elif committed > Position(number + 1):
            text = f"batch {number} could not be built and is left out"
            yield _finding("note", text, since, reason=why, batch=number)
        else:
            text = f"batch {number} could not be built"
            yield _finding("failed", text, since, reason=why, remedy=remedy, batch=number)


def _unlearned(facts: RunFacts) -> Iterator[Finding]:
    """Reports that all advantages of the newest batch are 0."""
    newest = facts.newest
    if newest is None or not facts.compares_groups or not 0 < newest.groups.groups == newest.groups.zero_variance:
        return
    groups, mean = newest.groups.groups, newest.groups.score_sum / newest.groups.trajectories
    yield _finding(
        "slow",
        f"nothing is learned from batch {newest.last}",
        newest.at,
        reason=f"all advantages are 0: the samples of each of its {_count(groups, 'group', 's')} have equal scores, "
        f"{mean:.3g} on average",
        remedy="check the rewards, or sample prompts that some samples solve; zero_variance_filter: replace trains "
        "other groups instead",
        batch=newest.last,
    )


def _rollbacks(facts: RunFacts) -> Iterator[Finding]:
    if facts.counts.generation > 1:
        yield _finding(
            "note",
            f"the run is in generation {facts.counts.generation}: its log was found shorter than confirmed, so what "
            "was accepted or acknowledged last before may be lost; the runbook says how a trainer goes on",
            None,
        )


def _unhealthy(facts: RunFacts) -> Iterator[Finding]:
    if facts.unhealthy_reason:
        yield _finding("stuck", facts.unhealthy_reason, None)


def _log(facts: RunFacts) -> Iterator[Finding]:
    if reason := facts.compaction_failed:
        text = "no snapshot of the run's log could be written, so the log grows, and a restart takes longer"
        remedy = "nothing is lost, and the next try comes within 10 minutes; see log not compacted in the messages"
        yield _finding("slow", text, None, reason=reason, remedy=remedy)


def _ranks(facts: RunFacts) -> Iterator[Finding]:
    for model in facts.models:
        ready = [rank for rank, position in enumerate(model.next) if position.batch in facts.published]
        if ready:
            yield from _working_ranks(facts, model, ready)
        elif facts.awaiting is None and (not facts.counts.finished or facts.has_groups or facts.building is not None):
            yield _waiting_ranks(facts, model)


def _working_ranks(facts: RunFacts, model: ModelFacts, ready: Sequence[int]) -> Iterator[Finding]:
    """Reports ranks that are slow or stuck. ready: the ranks that have a shard to train on."""
    least = min(model.next[rank] for rank in ready)
    last = [rank for rank in ready if model.next[rank] == least]
    past = sum(position > least for position in model.next)
    now = facts.now
    if past:
        late = [rank for rank in last if now - available(facts, model, rank) >= LATE_RANK_S]
        if late:
            others = f"{past} other {'rank is' if past == 1 else 'ranks are'} past it"
            since = min(available(facts, model, rank) for rank in late)
            text = f"{_did_not(facts, model, late)}; {others}"
            yield _finding("stuck", text, since, at=least, model=model.model, ranks=late)
        return
    # The last rank to arrive delays the others, which have waited for it.
    since = max(available(facts, model, rank) for rank in last)
    longest = facts.history.longest_step[model.model]
    pace = longest or _FIRST_STEP_S
    if now - since >= max(_SLOW_RANKS_S, _SLOW_STEPS * pace):
        level: Level = "stuck" if now - since >= max(_STUCK_RANKS_S, _STUCK_STEPS * pace) else "slow"
        before = f"the longest step before took {longest:.0f} s" if longest else "they took no step yet"
        text = f"{_did_not(facts, model, last)}; {before}"
        yield _finding(level, text, since, at=least, model=model.model, ranks=last)


def _waiting_ranks(facts: RunFacts, model: ModelFacts) -> Finding:
    number = min(model.next).batch
    ranks = f"{model.model} ranks wait for" if model.has_trainer else "no trainer has called yet;"
    since = max(times.since for times in facts.history.ranks[model.model])
    if facts.building is not None:
        return _finding("note", f"{ranks} batch {number}, which is being built", since)
    have, need = facts.counts.groups_complete, facts.train_batch_size
    tags = ", ".join(f"{count} of tag {tag!r}" for tag, count in facts.missing_tags.items())
    text = f"{ranks} batch {number}: {have} of {need} groups are complete"
    if facts.seals_by_call and not facts.counts.finished:
        text = f"{ranks} batch {number}, which SealBatch seals (seal_by: call): {_count(have, 'group', 's')} complete"
    oldest = facts.open_groups[0] if facts.open_groups else None
    parts = (text, tags and f"tag_shares lacks {tags}", facts.lacking)
    return _finding("note", "; ".join(filter(None, parts)), since, group=oldest)


def _columns(facts: RunFacts) -> Iterator[Finding]:
    """Reports a batch that waits for columns. Its trainer counts as working while columns arrive."""
    if facts.awaiting is None:
        return
    since = facts.history.of_batch(facts.awaiting.number).columns
    waited = 0.0 if since is None else facts.now - since
    level: Level = "stuck" if waited >= _STUCK_COLUMNS_S else "slow" if waited >= _SLOW_COLUMNS_S else "note"
    yield _finding(level, _awaited(facts.awaiting), since, batch=facts.awaiting.number)


def _awaited(batch: AwaitingBatch) -> str:
    shown = ", ".join(f"mini-batch {mini_batch} rank {rank}" for mini_batch, rank in batch.missing)
    more = " and more" if batch.lacking > len(batch.missing) else ""
    return (
        f"batch {batch.number} waits for {', '.join(batch.columns)}, which trainers write, of {batch.lacking} of "
        f"{batch.shards} policy shards: {shown}{more}"
    )


def _build(facts: RunFacts) -> Iterator[Finding]:
    if facts.building is not None:
        times = facts.history.of_batch(facts.building)
        since = times.columns or times.sealed
        if since is not None and facts.now - since >= _LONG_BUILD_S:
            text = f"batch {facts.building} is sealed and not published"
            yield _finding("slow", text, since, batch=facts.building)


def _room(facts: RunFacts) -> Iterator[Finding]:
    if facts.room.groups or facts.counts.finished:
        return
    since, reason = facts.history.full_since, facts.room.reason
    has_work = facts.ranks_have_work or facts.building is not None or facts.awaiting is not None
    if has_work or facts.counts.groups_open:
        yield _finding("note", f"workers wait for capacity: {reason}", since)
        return
    # A deadlock: all buffered batches are trained, and no group of the next batch may begin.
    since = max(since or facts.history.began, facts.history.last_event)
    level: Level = "stuck" if facts.now - since >= _BLOCKED_S else "note"
    yield _finding(level, f"workers wait for capacity, and ranks for a batch: {reason}", since)


def _dropped(facts: RunFacts) -> Iterator[Finding]:
    """Reports that no group reaches a batch, because all are dropped."""
    if not facts.dropped_in_a_row:
        return
    reasons = facts.history.dropped.most_common(_SHOWN_DROP_REASONS)
    yield _finding(
        "slow",
        f"the last {facts.dropped_in_a_row} groups were all dropped, and none reached a batch",
        None,
        reason=", ".join(f"{count} {reason}" for reason, count in reasons),
        remedy=_DROP_REMEDIES.get(reasons[0][0], "see the logs of the workers, which aborted these groups"),
    )


def _stragglers(facts: RunFacts) -> Iterator[Finding]:
    """Reports groups that have been open for long. While ranks have work, these groups delay nobody."""
    now = facts.now
    old = [group for group in facts.open_groups if now - group.since >= _LONG_GROUP_S]
    if not old:
        return
    first, more = old[0], "or more " if len(old) == SHOWN_GROUPS else ""
    groups = "group is" if len(old) == 1 else "groups are"
    text = (
        f"{len(old)} {more}{groups} open for long; the oldest, {first.uid!r}, has {first.complete} of "
        f"{first.samples} samples; {first.reason}"
    )
    if facts.ranks_have_work or facts.building is not None:
        yield _finding("note", text, first.since, group=first)
    elif now - max(first.since, facts.history.rows_since) >= _NO_ROWS_S:
        yield _finding("stuck", f"{text}, and no row arrives", first.since, group=first)
    else:
        yield _finding("slow", text, first.since, group=first)


def _did_not(facts: RunFacts, model: ModelFacts, ranks: Sequence[int]) -> str:
    if not model.has_trainer:
        return f"no trainer has called yet, and {model.model} {_place(model.next[ranks[0]])} is published"
    nobody = all(has_pulled(facts, model, rank) is False for rank in ranks)
    verb = "even pull" if nobody else "acknowledge"
    return f"{model.model} {_named(ranks)} did not {verb} {_place(model.next[ranks[0]])}, which is published"


def _finding(
    level: Level,
    text: str,
    since: float | None,
    *,
    reason: str = "",
    remedy: str = "",
    batch: int | None = None,
    at: Position | None = None,
    model: Model | None = None,
    ranks: Sequence[int] = (),
    group: OpenGroup | None = None,
) -> Finding:
    """Creates a finding. batch, model, ranks, group: its subject. at: the mini-batch that ranks must acknowledge."""
    return Finding(
        level=level,
        text=text[:_LONGEST_TEXT],
        reason=reason[:_LONGEST_REASON],
        remedy=remedy[:_LONGEST_TEXT],
        since=None if since is None else seconds(since),
        batch=batch if at is None else at.batch,
        mini_batch=None if at is None else at.mini_batch,
        model=model,
        ranks=list(ranks[:_NAMED_RANKS]),
        uid=None if group is None else group.uid,
        round=None if group is None else group.round,
    )


def _count(number: int, word: str, plural: str = "es") -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}{plural}"


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_NAMED_RANKS]))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{' and more' if len(ranks) > _NAMED_RANKS else ''}"


def _place(position: Position) -> str:
    epoch = f" epoch {position.epoch}" if position.epoch else ""
    return f"batch {position.batch}{epoch} mini-batch {position.mini_batch}"
