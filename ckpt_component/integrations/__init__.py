"""Adapters for training frameworks, one module each, which imports its framework; nothing imports the modules."""
