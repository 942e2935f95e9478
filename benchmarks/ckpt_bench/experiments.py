"""The experiments of `ckpt-bench` beside its rows: each has figures, files and a page of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .growth.cost_page import costs_shown
from .growth.costs import read_growth, write_growth
from .growth.courses import measure_courses
from .hosts.host_page import hosts_shown
from .hosts.host_rows import measure_hosts, read_hosts, write_hosts
from .presentation import Presentation
from .publishing.publish_page import publishing_shown
from .publishing.publish_rows import measure_publishing, read_publishing, write_publishing
from .recovery.kill_turns import measure_turns
from .recovery.restart_page import restarts_shown
from .recovery.restarts import read_restarts, write_restarts
from .schema import Action


@dataclass(frozen=True)
class Experiment:
    """One experiment.

    Attributes:
        cpu_alone: why it has no use for another device
        measure: measures; with the config, the folder's parent and the key that set it, the description of the machine,
            the folder of the figures, and what prints a line of progress
        read: reads the figures and the description of an earlier run
        write: writes them
        shown: what the figures come to
        one_state: whether it takes only one state and one target
        failure: what is said of promises that do not hold, and what one is called
    """

    cpu_alone: str
    measure: Callable[..., Any]
    read: Callable[[str], tuple[Any, dict[str, Any]]]
    write: Callable[..., None]
    shown: Callable[[Any], Presentation]
    one_state: bool = True
    failure: tuple[str, str] = ("{} failed", "promise")


EXPERIMENTS: Mapping[Action, Experiment] = {
    Action.growth: Experiment(
        "costs in Python grow alike there",
        measure_courses,
        read_growth,
        write_growth,
        costs_shown,
        one_state=False,
        failure=("{} grew faster than linearly", "cost"),
    ),
    Action.recovery: Experiment(
        "trainers of this benchmark have their state in host memory",
        measure_turns,
        read_restarts,
        write_restarts,
        restarts_shown,
    ),
    Action.hosts: Experiment("copies are of host memory", measure_hosts, read_hosts, write_hosts, hosts_shown),
    Action.publish: Experiment(
        "versions are made of checkpoints, wherever their tensors come from",
        measure_publishing,
        read_publishing,
        write_publishing,
        publishing_shown,
    ),
}
