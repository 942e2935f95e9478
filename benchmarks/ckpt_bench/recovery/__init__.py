"""What a killed job costs: every phase of its restart, by where it resumes from, and what snapshots in memory cost."""
