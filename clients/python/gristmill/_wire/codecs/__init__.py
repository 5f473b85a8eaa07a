"""Rows, shards and columns as bytes, written and read by hand."""
