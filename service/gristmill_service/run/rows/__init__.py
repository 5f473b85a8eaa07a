"""The rows that a run stores: their tables, the tokens that they share, and how a batch gathers them."""
