"""What callers ask of a state, and wait for."""
