"""Every key of the benchmark: its type, default and range, and one line on what it does. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

from ckpt_component.config.hydra.composable import composable
from ckpt_component.config.hydra.compose import plain_dict
from ckpt_component.config.hydra.hydra_errors import HydraConfigError, for_hydra
from ckpt_component.config.hydra.read import read as read_values
from ckpt_component.config.hydra.store import (
    PROVIDER,
    SCHEMAS,
    register as register_checkpoint_configs,
    registered,
    store_files,
)
from ckpt_component.config.quantities import BYTES, SECONDS, above, at_least
from ckpt_component.core.spelling import invalid_choice
from ckpt_component.core.storage.locate import expanded

from .measure.row_kinds import FAMILIES, ROWS, rows_of
from .publishing.row_calls import PUBLISH_ROWS
from .recovery.restart_rows import RESTART_ROWS

#: Name -> size in gigabytes (1e9), rounded up.
STATES: Mapping[str, float] = {
    "large": 1.5,
    "many_small": 0.7,
    "moe": 1.5,
    "bf16_mixed": 1.77,
    "weights": 0.51,
    "tiny": 0.03,
}
TARGETS = ("disk", "tmpfs")
#: States whose weights `recovery` trains: weights and moments have the size of the state, or it is for tests.
_TRAINED = ("large", "tiny")
#: Numbers of ranks, if none are given.
_RANKS = (1, 2, 10, 30, 100, 300, 1_000)
_RANKS_KILLED = (1, 2)
_HOSTS = (2, 10, 30, 100, 300, 1_000, 4_096)
_HOSTS_READING = (2, 4)
_FOLDERS = ("dir", "tmpfs_dir", "peers_dir", "results")


class Action(Enum):
    """What `ckpt-bench` does."""

    run = "run"
    check = "check"
    peers = "peers"
    growth = "growth"
    recovery = "recovery"
    hosts = "hosts"
    publish = "publish"


#: The rows of actions that have their own.
_ROWS = {Action.recovery: RESTART_ROWS, Action.publish: PUBLISH_ROWS}


class Device(Enum):
    """The device of the states."""

    cpu = "cpu"
    cuda = "cuda"


@dataclass
class Bench:
    """The whole config of `ckpt-bench`."""

    action: Action = Action.run
    """`run`: measure; `check`: and hold the figures to what is promised; `peers`: make the peers' environment;
    `growth`: measure what grows with the number of items, ranks and hosts; `recovery`: kill jobs, and measure how they
    come back; `hosts`: copies to peers beside a plain TCP stream, and loads whose hosts read each byte once;
    `publish`: versions of weights for inference beside full exports, and how soon receivers have them."""
    state: Any = None
    """What is saved, a name or a list: large, many_small, moe, bf16_mixed, weights, or tiny, which is for tests; null:
    large, and for `publish` weights."""
    target: Any = field(default_factory=lambda: ["disk"])
    """Where to, a name or a list: disk (a folder made in `dir`) or tmpfs (one in /dev/shm); both are removed after."""
    rows: Any = field(default_factory=lambda: ["all"])
    """What is measured, a name or a list: rows, or `ours`, `torch`, `peers`, `all`; for `recovery`: memory, meta,
    disk, dcp_load, empty, or `all`; for `publish`: versions, training, pulls, or `all`."""
    device: Device = Device.cpu
    """Where the states and the loop are: `cpu`, or `cuda`, one CUDA device; rows of ours and of torch alone."""
    budget: float | None = above(0, 570.0, SECONDS)
    """How long all rows together may take: saves and repeats become fewer, rows do not; null: as long as they need."""
    repeats: int = at_least(1, 5)
    """Fresh processes per row, as far as `budget` allows; rows take turns."""
    saves: int = at_least(1, 3)
    """Saves in each process after the first; their median is the figure of one repeat."""
    enough_seconds: float = above(0, 20.0, SECONDS)
    """No further save or load of a kind begins after so many seconds of them; `budget` may lower it."""
    loop_threads: int = at_least(1, 1)
    """Threads of the simulated training loop."""
    step_seconds: float = above(0, 0.02, SECONDS)
    """Approximate duration of a step of that loop."""
    pairs: int = at_least(1, 7)
    """Saves beside that loop: cycles of equal length, without and with a save in turn; up to `enough_seconds`."""
    tail_seconds: float = at_least(0, 0.3, SECONDS)
    """How long a cycle continues after its save is complete, to include late page faults and write-back."""
    row_timeout: float = above(0, 900.0, SECONDS)
    """Time limit of a row's process in seconds; then it is killed and reported as an error. `budget` may lower it."""
    dir: str = "."
    """A folder on the disk to measure."""
    tmpfs_dir: str = "/dev/shm"
    """Where the tmpfs is mounted."""
    peers_dir: str = "~/.cache/ckpt_component/bench-peers"
    """Where the peers' environment is, and where `action=peers` makes it."""
    items: Any = field(default_factory=lambda: [1_000, 3_000, 10_000, 30_000, 100_000])
    """For `growth`: numbers of tensors of one rank; `[]` leaves them out."""
    ranks: Any = None
    """Numbers of ranks. For `growth`, from 1 to 1,000 by default: rank 0 is a process, threads of others are the rest,
    and `[]` leaves them out. For `recovery`, 1 and 2 by default, all processes."""
    hosts: Any = None
    """Numbers of hosts, each with one rank. For `growth`, from 2 to 4,096 by default, all simulated, with copies at a
    peer; `[]` leaves them out. For `hosts`, 2 and 4 by default."""
    storage_rate: float = above(0, 0.5e9, BYTES)
    """For `hosts`: bytes in a second that storage gives to all hosts together."""
    results: str | None = None
    """An earlier run's folder: its figures are shown, checked and drawn again, and nothing is measured."""


@dataclass(frozen=True)
class BenchRequest:
    """A checked config: lists are lists, row families are rows."""

    bench: Bench
    states: list[str]
    targets: list[str]
    rows: list[str]
    sizes: dict[str, list[int]]


def register() -> None:
    """Register the schemas of checkpoints and of the benchmark with Hydra."""
    register_checkpoint_configs()
    if registered("bench"):
        return
    ConfigStore.instance().store(group=SCHEMAS, name="bench", node=composable(Bench), provider=PROVIDER)
    # Stored here rather than on Hydra's search path, which all apps share.
    store_files(Path(__file__).parent / "conf", None)


def read(config: DictConfig) -> BenchRequest:
    """Convert the config to a request.

    Raises:
        CheckpointConfigError: a value is out of range, or a name is unknown; the text says what to type
    """
    values = plain_dict(config, resolve=True)
    with for_hydra():
        folders = {key: expanded(values[key], key) for key in _FOLDERS if isinstance(values[key], str)}
    bench = read_values(Bench, {**values, **folders}, "")
    kills = bench.action is Action.recovery
    ranks = [*(_RANKS_KILLED if kills else _RANKS)] if bench.ranks is None else bench.ranks
    reads = bench.action is Action.hosts
    hosts = [*(_HOSTS_READING if reads else _HOSTS)] if bench.hosts is None else bench.hosts
    usual = ["weights" if bench.action is Action.publish else "large"]
    return BenchRequest(
        bench=bench,
        states=_names("state", usual if bench.state is None else bench.state, _TRAINED if kills else list(STATES)),
        targets=_names("target", bench.target, TARGETS),
        rows=_own_rows(bench.rows, [*_ROWS[bench.action]]) if bench.action in _ROWS else _saving_rows(bench.rows),
        sizes={
            "items": _sizes("items", bench.items),
            "ranks": _sizes("ranks", ranks),
            "hosts": _sizes("hosts", hosts),
        },
    )


def _saving_rows(value: Any) -> list[str]:
    names = _names("rows", value, [*ROWS, *FAMILIES, "all"])
    chosen = {row for name in names for row in (rows_of(*FAMILIES) if name == "all" else rows_of(name) or [name])}
    return [row for row in ROWS if row in chosen]


def _own_rows(value: Any, rows: Sequence[str]) -> list[str]:
    names = _names("rows", value, [*rows, "all"])
    return [row for row in rows if row in names or "all" in names]


def _sizes(key: str, value: Any) -> list[int]:
    sizes = value if isinstance(value, list) else [value]
    for size in sizes:
        if type(size) is not int or size < 1:
            raise HydraConfigError(f"{key}={size} is no size; use whole numbers from 1, such as {key}=1000,10000.")
    return sorted(set(sizes))


def _names(key: str, value: Any, words: Sequence[str]) -> list[str]:
    names = list(dict.fromkeys(value if isinstance(value, list) else [value]))
    if not names:
        raise HydraConfigError(f"{key} is empty; give it some of {', '.join(words)}.")
    for name in names:
        if name not in words:
            raise HydraConfigError(invalid_choice(key, name, words))
    return names
