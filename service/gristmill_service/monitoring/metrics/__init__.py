"""What /metrics tells; docs/metrics.md lists it, and a test holds the two together.

    registry   the process's own: calls, stores, leases
    runs       each run's, as the run itself counts them (`run.meters`): they go when the run goes
    storing    what stores and journals take, measured around them
    text       the Prometheus text format

Labels are bounded: runs, ranks, and words of ours; never a uid.
"""

from gristmill_service.monitoring.metrics.registry import Metrics

__all__ = ["Metrics"]
