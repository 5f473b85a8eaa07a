"""The decisions: each reads the state and returns events, and changes nothing."""
