"""The engines: the connection to one, and what each calls the fields that the recorder needs."""
