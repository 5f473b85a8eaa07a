"""`gristmill.capture`: records the calls of HTTP clients in the agent's own process."""
