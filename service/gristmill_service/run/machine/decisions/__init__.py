"""The decisions: each reads the state, returns events, and changes nothing."""
