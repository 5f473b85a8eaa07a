"""Converts frameworks' rollouts to rows. Reads objects by their attributes and keys, without importing a framework."""
