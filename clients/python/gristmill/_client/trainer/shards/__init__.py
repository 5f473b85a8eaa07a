"""Opens a trainer's shards: mapped or streamed, some ahead of their use."""
