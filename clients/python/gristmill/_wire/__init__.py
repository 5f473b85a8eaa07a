"""Columns, rows and their encoding, which clients and the service share. Not public."""
