"""Measure which settings suit a machine, a folder and a size of state, and write them as a recipe."""
