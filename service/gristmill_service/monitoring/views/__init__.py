"""The documents that the page shows: a run's history and settings, batches, rows and groups."""
