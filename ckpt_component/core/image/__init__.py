"""The layout of a state in files, and the arenas in host memory that hold it."""
