"""The rows that a run stores: their tables, their shared tokens, and how they are gathered for a batch."""
