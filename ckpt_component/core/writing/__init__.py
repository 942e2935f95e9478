"""Byte ranges to files, here or in a writer process (`writers` decides which bytes). Imports no torch."""
