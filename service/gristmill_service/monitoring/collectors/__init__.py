"""What is told of each event of a run, and counts or notes it."""
