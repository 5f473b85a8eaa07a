"""A run's health: a single definition for the page, the API, the commands and the metrics."""
