"""The clients of rollout workers, and what they hand over. Not public."""
