"""Runs and shards in Redis: one server, a master that sentinels watch, or a cluster."""
