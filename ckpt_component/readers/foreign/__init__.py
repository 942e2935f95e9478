"""Checkpoints that others wrote, read safely."""
