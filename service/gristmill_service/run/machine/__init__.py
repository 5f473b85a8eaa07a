"""The run's state machine, which is pure: events, the state that they make, and decisions, which return events."""
