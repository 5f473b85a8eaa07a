"""What stands before every handler: bounds, origins, names of hosts, and who calls."""
