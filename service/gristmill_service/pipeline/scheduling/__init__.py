"""Scheduling: which row trains in which mini-batch, on which rank, in which micro-batch."""
