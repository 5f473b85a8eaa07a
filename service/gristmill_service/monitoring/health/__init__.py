"""A run's health: one definition for the page, the API, the commands and the metrics."""
