"""The clients of trainers, and what they pull and write back. Not public."""
