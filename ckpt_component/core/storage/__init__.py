"""Files, folders and buckets; knows no checkpoint. `faults` makes them fail on demand. Imports no torch."""
