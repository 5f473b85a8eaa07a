"""Credit: what the rewards of trajectories become on each trained token."""
