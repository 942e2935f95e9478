"""Simulated seconds that troubles, scripts and the verdict have in common."""

from __future__ import annotations

#: For so long snapshots stay in memory, at most.
LEASE = 1200.0
#: Longer than a job takes; and until a rank is told that it cannot reach the store.
LONG, DEADLINE = 600.0, 100.0
#: Where a connection to the store breaks, a call is over by then.
SOON = 15.0
#: For so long a rank may not know that another one has died: until its heartbeats are missed.
UNNOTICED = 20.0
#: `timeouts.visible`.
VISIBLE = 20.0
