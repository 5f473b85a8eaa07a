"""Middleware that runs before all handlers: limits, origins, host names, and identity."""
