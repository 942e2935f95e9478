"""Moved to `ckpt_component.core.writing.write_job`; this documented name stays."""

from ckpt_component.core.writing.write_job import run_write_job as run_write_job
