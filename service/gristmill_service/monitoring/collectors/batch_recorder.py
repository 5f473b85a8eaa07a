"""Makes the record that a run keeps of each batch for good, from the batch's counts and what time was spent on."""

from __future__ import annotations

from gristmill_service.monitoring.collectors.run_metrics import SpentSeconds
from gristmill_service.pipeline.batch_stats import BatchStats
from gristmill_service.pipeline.group_counts import summed
from gristmill_service.run.machine.batch_records import BatchRecord, most_frequent


class BatchRecorder:
    """One run's. Called by the thread that builds its batches.

    spent: what time was spent on until the process took the run; each record has what came since the one before.
    """

    def __init__(self, spent: SpentSeconds) -> None:
        self._before = spent

    def record(self, batch: int, stats: BatchStats, at: float, spent: SpentSeconds) -> BatchRecord:
        before, self._before = self._before, spent
        rows, tokens, groups = stats.rows, stats.tokens, stats.groups
        return BatchRecord(
            first=batch,
            last=batch,
            batches=1,
            at=round(at, 1),
            groups=summed(groups.values()),
            rows=rows["submitted"],
            merged=rows["merged"],
            trained=rows["trained"],
            padding=rows["padding"],
            tokens=tokens["trained"],
            distinct=tokens["distinct"],
            elements=tokens["distinct"] + tokens["padding"],
            loss_tokens=tokens["loss"],
            breaks=sum(stats.mismatches.values()),
            stale=int(stats.staleness.sum()),
            versioned=len(stats.staleness),
            stalest=int(stats.staleness.max(initial=0)),
            seconds=spent.passed - before.passed,
            workers_waited=spent.workers_waited - before.workers_waited,
            # Ranks that are there no more count no longer.
            ranks_waited=max(0.0, spent.ranks_waited - before.ranks_waited),
            stages={
                stage: round(seconds - before.stages.get(stage, 0.0), 4) for stage, seconds in spent.stages.items()
            },
            tags=most_frequent(groups) if any(groups) else {},
        )
