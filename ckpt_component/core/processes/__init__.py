"""Child processes: how they start, talk and end, what an exit means, and which process is alive. Imports no torch."""
