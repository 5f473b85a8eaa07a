"""The forms: how the requests and answers of each API are translated and read."""
