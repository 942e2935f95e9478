"""Checkpoints on disk: file-system operations, names, the commit protocol, manifests. Does not import torch."""
