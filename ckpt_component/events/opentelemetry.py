"""Saves and restores as spans of OpenTelemetry: one per save with a child per phase, one per restore."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .listener import CheckpointListener, imported
from .reports import LoadReport, SaveReport


class OpenTelemetryListener(CheckpointListener):
    """Makes spans `checkpoint.save` and `checkpoint.load`, on every rank, when they have ended.

    Their parent is the span that was current when the listener was made, if there was one.

    Args:
        tracer_provider: where the spans go; None: the provider of the process

    Raises:
        CheckpointConfigError: opentelemetry-api is not installed
    """

    def __init__(self, tracer_provider: Any = None) -> None:
        self._trace = imported("opentelemetry.trace", "opentelemetry-api")
        self._context = imported("opentelemetry.context", "opentelemetry-api").get_current()
        self._provider = tracer_provider

    def on_committed(self, report: SaveReport) -> None:
        """Make the spans of the save."""
        names = ("bytes", "reused", "stall_s", "lost_s", "attempts", "memory")
        self._make("checkpoint.save", report, {name: getattr(report, name) for name in names})

    def on_failed(self, report: SaveReport) -> None:
        """Make the spans of what there was of the save."""
        self._make("checkpoint.save", report, {"attempts": report.attempts, "memory": report.memory})

    def on_restored(self, report: LoadReport) -> None:
        """Make the spans of the load."""
        self._make("checkpoint.load", report, {"bytes": report.bytes, "verified": report.verified})

    def _make(self, name: str, report: SaveReport | LoadReport, attributes: Mapping[str, Any]) -> None:
        tracer = self._trace.get_tracer("ckpt_component", tracer_provider=self._provider)
        step = {} if report.step is None else {"step": report.step}
        known = {"path": report.path, "outcome": report.outcome, **step, **attributes}
        named = {f"checkpoint.{key}": value for key, value in known.items()}
        span = tracer.start_span(name, self._context, start_time=_nanoseconds(report.time), attributes=named)
        inside = self._trace.set_span_in_context(span, self._context)
        for phase, (begin, end) in report.spans.items():
            child = tracer.start_span(f"{name}.{phase}", inside, start_time=_nanoseconds(report.time + begin))
            child.end(_nanoseconds(report.time + end))
        if report.error is not None:
            span.set_status(self._trace.StatusCode.ERROR, report.error)
        span.end(_nanoseconds(report.time + report.seconds))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
