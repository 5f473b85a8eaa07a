"""The clients of rollout workers, and the rows that they submit. Not public."""
