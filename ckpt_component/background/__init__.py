"""Followers of the commits of a run, in child processes: uploads, exports, published weights. Imports no torch."""
