"""Fault injection: a file system that fails at chosen operations."""
