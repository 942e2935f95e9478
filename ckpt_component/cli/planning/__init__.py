"""What saving will cost a run: formulas, and rates measured in an earlier run. Imports no torch."""
