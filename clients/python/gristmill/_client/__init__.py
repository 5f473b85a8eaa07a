"""The inner parts of the clients. Not public."""
