"""One writer a run: commands are decided in turn, logged together, applied, and answered."""
