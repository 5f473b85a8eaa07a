"""Hand-written encoders and decoders of rows, shards and columns."""
