"""Who may call what: the table of calls and roles, the tokens that callers show, and the certificates of both APIs."""
