"""All of the configs that imports Hydra: composition, checks, hints, and the building of parts. Imports no torch."""
