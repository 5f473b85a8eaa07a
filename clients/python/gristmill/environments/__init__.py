"""Environments that feed a run, one module for each family of them.

A module imports no environment's package: it is handed the environment, made by its own package, and calls it.
"""
