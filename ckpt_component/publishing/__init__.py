"""Weights published to inference: versions in a folder or bucket, whole ones and deltas, and folders that follow them."""
