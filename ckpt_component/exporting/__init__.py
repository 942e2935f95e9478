"""Tensors of a checkpoint as files of other programs, streamed in blocks. Imports no torch."""
