"""The decisions: functions that read the state and return events, and change nothing."""
