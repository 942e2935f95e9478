"""Moved to `ckpt_component.cli.reports`."""
