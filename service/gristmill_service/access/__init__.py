"""Authorization: the roles that each call needs, the tokens of callers, and the certificates of both APIs."""
