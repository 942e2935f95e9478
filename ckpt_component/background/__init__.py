"""Work beside a run in child processes: uploads to the permanent place, and exports. Imports no torch."""
