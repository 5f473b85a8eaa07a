"""Converts frameworks' rollouts to rows. Imports no framework: objects are read by their attributes and keys."""
