"""The state dict: flattened, its structure, its shards and its objects."""
