"""The documents of the page: a run's history and settings, batches, rows and groups."""
