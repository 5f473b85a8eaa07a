"""Adapters that put a trainer on gristmill's shards, one module for each trainer.

A module imports its trainer only when it is imported itself: `from gristmill.adapters.trl import ...` needs TRL, and
importing this package needs nothing.
"""
