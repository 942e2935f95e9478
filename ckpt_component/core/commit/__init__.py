"""A checkpoint is there whole or not at all: names, manifest, protocols, locks, retention. Imports no torch."""
