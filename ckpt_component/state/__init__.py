"""The state dict: flattened, its structure (tied tensors are stored once), shards and objects."""
