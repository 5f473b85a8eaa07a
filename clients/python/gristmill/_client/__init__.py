"""How the clients work inside. Not public."""
