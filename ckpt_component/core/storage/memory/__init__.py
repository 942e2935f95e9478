"""The memory of a run's writer processes as one more storage, which outlives the trainers. Imports no torch."""
