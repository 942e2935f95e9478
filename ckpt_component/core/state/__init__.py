"""The state dict: flattened, its structure, shards and objects."""
