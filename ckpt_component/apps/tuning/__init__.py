"""Which settings suit this machine, this folder and this size of state: measured, and written as a recipe."""
