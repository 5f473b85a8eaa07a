"""`gristmill status`, `top` and `tail` show a running service in a terminal. They use only its public API."""
