"""What people see of a run's story and settings, of a batch, a row, and a group."""
