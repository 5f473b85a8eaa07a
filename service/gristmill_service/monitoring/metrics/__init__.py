"""The metrics that /metrics exposes; docs/metrics.md lists them, and a test holds the two together.

    registry        the process's own: calls, storage, leases
    run_families    each run's, as its monitor counts them: they go when the run goes
    storage_timing  the time that storage takes, measured around its calls
    exposition      the Prometheus text format

Labels are bounded: runs, ranks, and words of ours; never a uid.
"""

from gristmill_service.monitoring.metrics.registry import Metrics

__all__ = ["Metrics"]
