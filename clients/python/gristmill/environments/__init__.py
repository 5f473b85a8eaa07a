"""Feeds a run from environments, one module per family.

A module does not import the environment's package: the caller creates the environment and passes it.
"""
