"""Child processes: how they start, communicate and end, and which process is alive. Imports no torch."""
