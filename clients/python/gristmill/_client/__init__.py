"""The implementation of the clients. Not public."""
