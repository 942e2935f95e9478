"""Checkpoint formats: how a rank's tensors and objects map to files. Planning only, no I/O."""
