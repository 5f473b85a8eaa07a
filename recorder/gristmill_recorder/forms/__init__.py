"""What agents ask and engines answer: each API's form of a call."""
