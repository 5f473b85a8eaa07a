"""A run's monitor: it gets each event of the run, counts it for metrics, and notes its time for health and page."""
