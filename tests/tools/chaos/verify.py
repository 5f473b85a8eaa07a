"""The proof: the trainers' own logs of what took effect, against the workers' logs of what was acknowledged and against
what the service says of its groups.

A store that goes back to an older copy of itself loses what was acknowledged since. The proof accepts that loss only of
groups that were worked on in between, and only where the service reports it: its run's generation has grown then. One
that loses a part of what it held makes batches fail and groups be dropped: that is accepted where the mode allows it,
and only of batches and groups that the service names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product, zip_longest
from math import isclose

from gristmill import Group, GroupState
from gristmill._wire.addresses import Position
from tests.tools.chaos.contents import SAMPLES, Contents
from tests.tools.chaos.expected import expected_effects
from tests.tools.chaos.rank_log import Effect, Trained
from tests.tools.chaos.worker import WorkerLog

REPORTED_LOST = ("batch_failed", "rows_lost")
"""The reasons for which the service drops a group whose rows its store has lost."""


@dataclass(frozen=True)
class Rollback:
    """The store went back to what it held at `since`; at `until` it served again. is_reported: the generation grew."""

    since: float
    until: float
    is_reported: bool

    def excuses(self, times: Iterable[float]) -> bool:
        return self.is_reported and any(self.since <= at <= self.until for at in times)


@dataclass(frozen=True)
class Failures:
    """reported: batches that the service says have failed, with reasons. stepped_over: batches that the ranks left out.
    are_allowed: whether the store may lose a part of what it held."""

    reported: Mapping[int, str] = field(default_factory=dict)
    stepped_over: Sequence[int] = ()
    are_allowed: bool = False

    def excuse(self, group: Group) -> bool:
        """Whether the service reports that it lost the group's rows, and may."""
        return self.are_allowed and group.state is GroupState.DROPPED and group.reason in REPORTED_LOST


@dataclass
class Verdict:
    """Each list of findings names what is wrong; all are empty where nothing is. skipped: groups that the service has
    sealed, and nobody trained, and batches that the ranks left out although they had not failed. rolled_back: what was
    lost with a store's data, and reported; it is no finding, nor are rows_reported_lost, of batches that failed and
    groups that were dropped where that is allowed. values_trained: trained tokens that have what trainers wrote."""

    rows_acknowledged: int = 0
    rows_trained: int = 0
    values_trained: int = 0
    batches_failed: int = 0
    rows_reported_lost: int = 0
    groups: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    trained_twice: list[str] = field(default_factory=list)
    out_of_order: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    rolled_back: list[str] = field(default_factory=list)

    @property
    def findings(self) -> list[str]:
        return [*self.lost, *self.trained_twice, *self.out_of_order, *self.skipped, *self.wrong]

    @property
    def is_clean(self) -> bool:
        return not self.findings


_NO_FAILURES = Failures()


def verify(
    contents: Contents,
    epochs: int,
    logs: Sequence[WorkerLog],
    groups: Iterable[Group],
    launches: Sequence[Sequence[Sequence[Trained]]],
    rollbacks: Sequence[Rollback] = (),
    failures: Failures = _NO_FAILURES,
) -> Verdict:
    """launches: of each start of the trainer, of each rank, what survived in order."""
    verdict = Verdict(batches_failed=len(failures.reported))
    _check_failures(failures, verdict)
    _check_order(launches, epochs, failures, verdict)
    _check_writers(launches, verdict)
    effects = _effects_by_epoch(launches)
    known = {group.uid: group for group in groups}
    _check_batches(launches, known, failures, verdict)
    verdict.groups = Counter(group.reason or group.state for group in known.values())
    for log in logs:
        accepted: dict[str, list[tuple[str, int, int, int, str]]] = {}
        for row in log.rows:
            accepted.setdefault(row[0], []).append(row)
        for uid, rows in accepted.items():
            taken = [row for row in rows if row[4] in ("ACCEPTED", "DUPLICATE")]
            count = len({row[:4] for row in taken})
            verdict.rows_acknowledged += count
            if uid in known and failures.excuse(known[uid]):
                verdict.rows_reported_lost += count
                continue
            is_excused = any(rollback.excuses(log.times.get(uid, ())) for rollback in rollbacks)
            findings = Verdict()
            _check_group(contents, epochs, uid, taken, known.get(uid), effects, log, findings, is_excused)
            (verdict.rolled_back if is_excused else verdict.lost).extend(findings.lost)
            verdict.trained_twice += findings.trained_twice
            verdict.wrong += findings.wrong
    trained = {uid for per_epoch in effects for uid, _ in per_epoch}
    verdict.wrong += [
        f"{uid}: trained although {known[uid].state if uid in known else 'nobody knows it'}"
        for uid in sorted(trained)
        if uid not in known or not (known[uid].state is GroupState.SEALED or _has_failed(known[uid], failures))
    ]
    verdict.skipped += _skipped(contents, epochs, known.values(), effects)
    all_effects = [effect for per_epoch in effects for findings in per_epoch.values() for effect in findings]
    verdict.rows_trained = len(all_effects)
    verdict.values_trained = sum(effect.trained for effect in all_effects if effect.launch)
    return verdict


def _check_failures(failures: Failures, verdict: Verdict) -> None:
    """A batch fails only where that is allowed, and is left out only where it has failed."""
    if not failures.are_allowed:
        verdict.lost += [f"batch {number}: failed: {reason}" for number, reason in sorted(failures.reported.items())]
    verdict.skipped += [
        f"batch {number}: the ranks stepped over it, and the service does not say that it failed"
        for number in failures.stepped_over
        if number not in failures.reported
    ]


def _has_failed(group: Group, failures: Failures) -> bool:
    """Whether it was in a batch that failed, of which something may have been trained before."""
    return group.reason == "batch_failed" and failures.excuse(group)


def _check_order(
    launches: Sequence[Sequence[Sequence[Trained]]], epochs: int, failures: Failures, verdict: Verdict
) -> None:
    """All ranks of a launch have the same positions, and all launches together every position in turn; of a batch that
    was stepped over the first ones, or none."""
    order: list[Position] = []
    for number, ranks in enumerate(launches):
        places = [[trained.position for trained in rank] for rank in ranks]
        if any(place != places[0] for place in places):
            verdict.out_of_order.append(f"launch {number}: its ranks are out of step")
        order += places[0]
    sizes = Counter(position.batch for position in order if position.epoch == 0)
    trained = Counter(position.batch for position in order)
    expected: list[Position] = []
    for batch in range(max(sizes, default=-1) + 1):
        planned = [Position(batch, *place) for place in product(range(epochs), range(max(1, sizes[batch])))]
        expected += planned[: trained[batch]] if batch in failures.stepped_over else planned
    pairs = enumerate(zip_longest(order, expected))
    verdict.out_of_order += [
        f"step {at} is {actual} where the plan has {wanted}" for at, (actual, wanted) in pairs if actual != wanted
    ]


def _check_writers(launches: Sequence[Sequence[Sequence[Trained]]], verdict: Verdict) -> None:
    """What one launch trains of a batch was written by one launch, no later one."""
    for number, ranks in enumerate(launches):
        writers: dict[int, set[int]] = {}
        for trained in (trained for rank in ranks for trained in rank):
            writers.setdefault(trained.position.batch, set()).update(effect.launch for effect in trained.effects)
        verdict.wrong += [
            f"launch {number}: batch {batch} has columns of launches {sorted(numbers)}"
            for batch, numbers in writers.items()
            if len(numbers) > 1
        ]


def _check_batches(
    launches: Sequence[Sequence[Sequence[Trained]]], known: Mapping[str, Group], failures: Failures, verdict: Verdict
) -> None:
    """A group trains in the batch that the service says it went into, one that is not named any more in one that
    failed."""
    for trained in (trained for ranks in launches for rank in ranks for trained in rank):
        for uid in sorted({effect.uid for effect in trained.effects}):
            if uid not in known or known[uid].batch == trained.position.batch:
                continue
            if not (_has_failed(known[uid], failures) and trained.position.batch in failures.reported):
                verdict.wrong.append(f"{uid}: of batch {known[uid].batch} and trained at {trained.position}")


def _skipped(
    contents: Contents,
    epochs: int,
    groups: Iterable[Group],
    effects: Sequence[Mapping[tuple[str, int], Sequence[Effect]]],
) -> Iterator[str]:
    """Sealed groups of which an epoch trained nothing."""
    for group in groups:
        expected = [sample for sample in range(SAMPLES) if not contents.is_aborted(group.uid, sample)]
        if group.state is not GroupState.SEALED or not expected:
            continue
        for epoch in range(epochs):
            trained = effects[epoch] if epoch < len(effects) else {}
            if not any((group.uid, sample) in trained for sample in expected):
                yield f"{group.uid}: sealed into batch {group.batch}, and skipped in epoch {epoch}"


def _effects_by_epoch(
    launches: Sequence[Sequence[Sequence[Trained]]],
) -> list[dict[tuple[str, int], list[Effect]]]:
    """Per epoch, what took effect of each trajectory."""
    by_epoch: list[dict[tuple[str, int], list[Effect]]] = []
    for ranks in launches:
        for rank in ranks:
            for trained in rank:
                while len(by_epoch) <= trained.position.epoch:
                    by_epoch.append({})
                for effect in trained.effects:
                    by_epoch[trained.position.epoch].setdefault((effect.uid, effect.sample), []).append(effect)
    return by_epoch


def _check_group(
    contents: Contents,
    epochs: int,
    uid: str,
    taken: Sequence[tuple[str, int, int, int, str]],
    group: Group | None,
    effects: Sequence[Mapping[tuple[str, int], Sequence[Effect]]],
    log: WorkerLog,
    verdict: Verdict,
    is_excused: bool,
) -> None:
    """is_excused: rows of it may be gone, so that an earlier attempt at a trajectory may be the last one there is."""
    if not taken:
        return
    if group is None:
        verdict.lost.append(f"{uid}: rows of it were accepted, and the service knows no such group")
        return
    if group.state is GroupState.DROPPED:
        everything_aborted = all(contents.is_aborted(uid, sample) for sample in range(SAMPLES))
        if not group.reason or (uid in log.done and not everything_aborted):
            verdict.lost.append(f"{uid}: was handed over whole, and dropped: {group.reason!r}")
        return
    if group.state is not GroupState.SEALED:
        verdict.lost.append(f"{uid}: is {group.state} at the end")
        return
    for sample in range(SAMPLES):
        accepted = [row for row in taken if row[1] == sample]
        least = 0 if is_excused else max((row[3] for row in accepted), default=0)
        _check_trajectory(contents, epochs, uid, sample, bool(accepted), least, effects, log, verdict)


def _check_trajectory(
    contents: Contents,
    epochs: int,
    uid: str,
    sample: int,
    was_accepted: bool,
    least: int,
    effects: Sequence[Mapping[tuple[str, int], Sequence[Effect]]],
    log: WorkerLog,
    verdict: Verdict,
) -> None:
    """Each epoch has every row once, of one attempt from `least` on, and none where the trajectory was aborted."""
    name = f"{uid} sample {sample}"
    last_attempt = log.attempts.get((uid, sample), 0)
    for epoch in range(epochs):
        trained = effects[epoch].get((uid, sample), ()) if epoch < len(effects) else ()
        if not trained:
            if was_accepted and not contents.is_aborted(uid, sample):
                verdict.lost.append(f"{name}: accepted, and not trained in epoch {epoch}")
            continue
        if contents.is_aborted(uid, sample):
            verdict.wrong.append(f"{name}: aborted, and trained in epoch {epoch}")
        spans = [(effect.first, effect.last) for effect in trained]
        launch = trained[0].launch
        attempts = [
            expected_effects(contents, uid, sample, attempt, launch) for attempt in range(least, last_attempt + 1)
        ]
        if len(spans) > len(set(spans)):
            verdict.trained_twice.append(f"{name}: epoch {epoch} trained steps {sorted(spans)}")
        elif not any(len(trained) == len(expected) and _is_among(trained, expected) for expected in attempts):
            findings = verdict.lost if any(_is_among(trained, expected) for expected in attempts) else verdict.wrong
            findings.append(f"{name}: epoch {epoch} trained what is of no attempt from {least} on: {sorted(trained)}")


def _is_among(own: Iterable[Effect], expected: Iterable[Effect]) -> bool:
    """Whether these are all among the rows of an attempt."""
    by_name = {effect[:5]: effect for effect in expected}
    return all(effect[:5] in by_name and _is_same(effect, by_name[effect[:5]]) for effect in own)


def _is_same(actual: Effect, expected: Effect) -> bool:
    is_close = isclose(actual.reward, expected.reward, abs_tol=1e-5)
    is_close &= isclose(actual.advantage, expected.advantage, abs_tol=1e-3)
    return is_close and actual == expected._replace(reward=actual.reward, advantage=actual.advantage)
