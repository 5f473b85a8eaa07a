"""Collects a run's events: counts for metrics, and times for health and the page."""
