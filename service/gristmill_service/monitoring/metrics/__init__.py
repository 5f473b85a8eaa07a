"""The metrics that /metrics exposes; docs/metrics.md lists them, and a test compares the two.

    registry        the process's own: calls, storage, leases, and at each scrape those of its runs
    run_stats       each run's: what its monitor counted, and what its state says
    storage_timing  the time that storage takes, measured around its calls

Labels are bounded: runs, ranks, and words of ours; never a uid.
"""

from gristmill_service.monitoring.metrics.registry import Metrics

__all__ = ["Metrics"]
