"""The image of a checkpoint in host memory: items, layout, arenas and copies."""
