"""`gristmill status`, `top` and `tail`: a running service in a terminal, read through its public API alone."""
