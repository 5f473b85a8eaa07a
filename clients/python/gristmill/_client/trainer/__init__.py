"""The client of trainers: reads batches and writes columns back. Not public."""
