"""The rows that a run holds: their tables, what they share, and how a batch gathers them."""
