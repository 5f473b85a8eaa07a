"""What clients and the service share: columns, rows, and how they are encoded. Not public."""
