"""What follows the commits of a run, in child processes: uploads to the permanent place, exports. Imports no torch."""
