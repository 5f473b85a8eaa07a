"""Middleware before all handlers: limits, origins, host names, and identity."""
