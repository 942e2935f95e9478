"""Moved to `ckpt_component.cli.reports.callback`; this name stays, because configs of users have it as a target."""

from ckpt_component.cli.reports.callback import SweepReport as SweepReport
