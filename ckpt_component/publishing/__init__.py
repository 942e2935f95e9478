"""Weights published to inference: whole versions and deltas in a folder or bucket, and folders that follow them."""
