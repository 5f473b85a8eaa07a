"""Processes received rows: validates, filters, and merges rows that continue each other."""
