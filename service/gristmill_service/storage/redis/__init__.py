"""Runs and shards in Redis: a single server, a master with sentinels, or a cluster."""
