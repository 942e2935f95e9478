"""Export: tensors of a checkpoint as files that other programs read, streamed in blocks. Imports no torch."""
