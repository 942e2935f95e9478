"""How costs grow with the number of items of a rank, and with the number of ranks."""
