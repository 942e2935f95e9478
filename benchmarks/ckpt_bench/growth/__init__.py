"""How costs grow with the number of items of a rank, of ranks, and of hosts."""
