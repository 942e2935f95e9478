"""Committed checkpoints of a fast local folder are copied to their permanent place; imports no torch."""
