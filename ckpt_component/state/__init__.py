"""The state dict: flattening, structure, shards and objects."""
