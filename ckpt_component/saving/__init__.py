"""A save, from the call to the commit."""
