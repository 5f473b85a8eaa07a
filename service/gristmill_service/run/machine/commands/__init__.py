"""The commands of rollout workers, trainers and the worker that builds batches."""
