"""Weights of a run, published to inference as numbered versions: whole, or the changes of the version before."""
