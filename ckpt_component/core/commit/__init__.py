"""How a checkpoint becomes complete or not at all: names, manifest, protocols, locks, retention. Imports no torch."""
