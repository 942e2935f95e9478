"""Moved to `ckpt_component.core.writing.write_job`."""

from ckpt_component.core.deprecation import warn_deprecated
from ckpt_component.core.writing.write_job import run_write_job as run_write_job

warn_deprecated(__name__, "ckpt_component.core.writing.write_job", removed_in="0.4")
