"""Byte ranges to files, here or in a writer process. Imports no torch."""
