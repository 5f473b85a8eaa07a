"""`gristmill status`, `top` and `tail`: a running service from a terminal, by its public contract alone."""
