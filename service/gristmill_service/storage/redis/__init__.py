"""What lasts in Redis: shards without their padding."""
