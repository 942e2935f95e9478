"""Formats: how a rank's tensors and objects become files. Planning only, no I/O."""
