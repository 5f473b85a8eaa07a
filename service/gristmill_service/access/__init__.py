"""Authorization: the roles that each call requires, the tokens of callers, and the certificates of both APIs."""
