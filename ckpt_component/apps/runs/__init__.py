"""What the events of a run show: a trace of it, and a report. Imports no torch."""
