"""A rank's bytes in host memory, laid out once per structure: the tree, the items, the layout, the arena."""
