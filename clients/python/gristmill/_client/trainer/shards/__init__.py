"""Shards as a trainer opens them: mapped or streamed, some ahead of their use."""
