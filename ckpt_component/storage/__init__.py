"""What is on disk: file-system effects, names, the commit protocol, manifests. Imports no torch."""
