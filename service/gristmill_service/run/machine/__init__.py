"""The run's state machine, pure: events, the state that they make, and the decisions that read it and return events."""
