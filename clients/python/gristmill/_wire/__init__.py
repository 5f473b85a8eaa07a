"""Columns, rows and their encoding, shared by the clients and the service. Not public."""
