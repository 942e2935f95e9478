"""What a training loop holds: when to save, what to keep, where to resume, how to stop."""
