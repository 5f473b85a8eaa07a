"""Layout: the tensors of each shard, as ranges of memory to write or send."""
