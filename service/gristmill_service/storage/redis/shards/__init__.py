"""Published batches in Redis."""
