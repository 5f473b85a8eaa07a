"""Layout: the tensors of each shard, as runs of memory to be written or sent."""
