"""Files, folders and buckets behind one interface, `Storage`, which knows no checkpoint. Imports no torch."""
