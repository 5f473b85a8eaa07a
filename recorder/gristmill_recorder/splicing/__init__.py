"""Splicing: a call that continues a conversation is sent as the recorded tokens and what is new."""
