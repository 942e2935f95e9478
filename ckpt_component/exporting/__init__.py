"""Tensors of a checkpoint as files for other programs, streamed in blocks. Imports no torch."""
