"""The checkpoint manager of a training loop: when to save, what to keep, where to resume."""
