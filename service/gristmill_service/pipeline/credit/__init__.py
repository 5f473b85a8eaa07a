"""Credit assignment: computes advantages and returns from rewards."""
