"""Moved to `ckpt_component.cli.reports.callback`; configs of users have it as a target."""

from ckpt_component.cli.reports.callback import SweepReport as SweepReport
from ckpt_component.core.deprecation import warn_deprecated

warn_deprecated(__name__, "ckpt_component.cli.reports.callback", removed_in="0.4")
