"""Moved to `ckpt_component.core.writing`."""
