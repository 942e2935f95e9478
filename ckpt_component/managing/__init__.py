"""The manager that a training loop calls: when to save, what to keep, where to resume, how to stop."""
