"""What the figures of publishing come to: tables, verdicts, and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

from ckpt_component.cli.output import Table
from ckpt_component.cli.reports.page import new_figure, without_frame
from ckpt_component.core.storage.space import amount

from ..child import Run
from ..presentation import Presentation
from ..task import ERROR
from ..verdicts import Measured, Missing, Verdict, at_most, reported
from .publish_rows import ratios
from .row_calls import PULLS, TRAINING, VERSIONS

#: A delta has this part of the bytes of a whole version; it takes this part of the time of a full export, or where its
#: parts alone take longer, so many times as long as they, because of imports, checksums and the commit; and steps are
#: so many times as long.
_BYTES_BOUND, _EXPORT_BOUND, _FLOOR_BOUND, _STEP_BOUND = 0.04, 0.1, 1.5, 1.1
_BYTES_AIM, _RATE_AIM = 0.025, 0.7
#: The parts of publishing, in their order.
_PARTS = ("start", "read", "compare", "compress", "write")
_TIMES = {
    VERSIONS: ("whole", "export", "publish", "floor", *_PARTS),
    PULLS: ("pull_whole", "pull_delta", "follow_delta", "lag", "lag_publish"),
}
_KINDS = ("quiet", "kept", "published")
#: What the picture shows of each row.
_SHOWN = {**_TIMES, TRAINING: _KINDS}

LEGEND = """bytes: a delta over a whole version; 2 % of the elements of each tensor have changed to the next value
whole, publish, export: seconds of a process of low priority: the first version, a delta, `ckpt export hf` of the same
floor: its parts, in turn with it: start, a Python process with its imports; read, the checkpoint with its checksum;
compare, with a copy of the weights before it; compress; write, into that copy
encode: CPU time of the encoding of all weights, in memory
pull: `ckpt pull`, once; follow: the same, that goes on, with a spare folder
lag: from the commit of a checkpoint until a receiver that follows has its weights; of that, lag_publish: until they are
published
quiet, kept, published: a training step without snapshots, with one in memory after each, and with these published; on a
core of its own, if there are two and loop_threads=1
CPU, queue: seconds in which the thread of the loop ran, and in which it had no core; stall: of the call that saves"""


def publishing_shown(measured: Mapping[str, Run]) -> Presentation:
    """What the figures come to, judged."""
    seconds = {f"{row}: {name}": run[name] for row, run in measured.items() for name in _SHOWN[row] if run.get(name)}
    return Presentation(
        "ckpt-bench publish",
        "publish",
        [_times_table(measured), *([_training_table(measured[TRAINING])] if TRAINING in measured else [])],
        LEGEND,
        [verdict for row, run in measured.items() for verdict in _JUDGED[row](run)],
        "Seconds of each turn.",
        partial(_picture, seconds) if seconds else None,
    )


def _times_table(measured: Mapping[str, Run]) -> str:
    lines = [["", "", "seconds", "low..high", "CPU", "over export", "over floor"]]
    sizes, failed = list[str](), list[str]()
    for row, run in measured.items():
        for name in _TIMES.get(row, ()):
            if values := run.get(name):
                cpu = f"{median(run[f'{name}_cpu']):.2f}" if f"{name}_cpu" in run else ""
                over = [_over(run, name, other) for other in ("export", "floor")]
                lines.append([row, name, f"{median(values):.3f}", f"{min(values):.3f}..{max(values):.3f}", cpu, *over])
        if ERROR in run:
            failed.append(f"{row}: FAILED: {run[ERROR]}")
        if run.get("delta_bytes"):
            size, whole = median(run["delta_bytes"]), run["whole_bytes"]
            sizes.append(f"a delta has {amount(size)}, {size / whole:.4f} of the {amount(whole)} of a whole version")
    return "\n".join(["\nversions of weights; medians, in seconds", *Table(lines).text(), *sizes, *failed])


def _over(run: Run, name: str, other: str) -> str:
    found = ratios(run, name, other) if name != "whole" else []
    return f"{median(found):.2f}" if found else ""


def _training_table(run: Run) -> str:
    lines = [["", "step", "low..high", "CPU", "queue", "stall", "over quiet"]]
    for kind in _KINDS:
        if values := run.get(kind):
            cpu, queue = (f"{median(run[f'{kind}_{name}']):.4f}" for name in ("cpu", "queue"))
            stall = f"{median(run[f'{kind}_stall']):.4f}" if f"{kind}_stall" in run else ""
            times = f"{median(ratios(run, kind, 'quiet')):.3f}"
            lines.append(
                [kind, f"{median(values):.4f}", f"{min(values):.4f}..{max(values):.4f}", cpu, queue, stall, times]
            )
    stolen = f"the host stole {sum(run['stolen']):.2f} s" if "stolen" in run else ""
    versions = f"{sum(run['published_versions']):.0f} versions were published" if "published_versions" in run else ""
    return "\n".join(["\ntraining; medians, in seconds", *Table(lines).text(), *filter(None, (stolen, versions))])


def _judge_versions(run: Run) -> list[Verdict]:
    size: Measured | Missing = "no delta was measured"
    if run.get("delta_bytes"):
        size = Measured("a delta", median(run["delta_bytes"]) / run["whole_bytes"])
    published, floor = _middle(run, "a delta", "publish", "export"), _middle(run, "its parts", "floor", "export")
    an_export, the_parts = Measured("a full export", 1.0), _middle(run, "a delta", "publish", "floor")
    if isinstance(floor, Measured) and floor.value > _EXPORT_BOUND:
        over_export = reported("versions: seconds", published, an_export)
        over_parts = at_most("versions: seconds", _FLOOR_BOUND, the_parts, Measured("its parts", 1.0))
    else:
        over_export = at_most("versions: seconds", _EXPORT_BOUND, published, an_export)
        over_parts = reported("versions: seconds", the_parts, Measured("its parts", 1.0))
    return [
        at_most(f"versions: bytes (aim {_BYTES_AIM})", _BYTES_BOUND, size, Measured("a whole version", 1.0)),
        over_export,
        over_parts,
        reported(f"versions: GB/s of encoding by one core (aim {_RATE_AIM})", _rate(run), Measured("second", 1.0)),
    ]


def _rate(run: Run) -> Measured | Missing:
    if not run.get("encode_cpu"):
        return "no encoding was measured"
    return Measured("GB of weights", run["bytes"] / 1e9 / median(run["encode_cpu"]))


def _judge_training(run: Run) -> list[Verdict]:
    published, kept = _middle(run, "published", "published", "kept"), Measured("not published", 1.0)
    cpu = _middle(run, "published", "published_cpu", "kept_cpu")
    lost = {
        kind: list(map(sum, zip(run[f"{kind}_stall"], run[f"{kind}_queue"], strict=True)))
        for kind in ("published", "kept")
        if f"{kind}_stall" in run
    }
    return [
        at_most("training: a step with snapshots", _STEP_BOUND, published, kept),
        reported("training: CPU of a step with snapshots", cpu, kept),
        reported("training: stall and queue of a step", _middle(lost, "published", "published", "kept"), kept),
    ]


def _judge_pulls(run: Run) -> list[Verdict]:
    whole = Measured("a whole version", 1.0)
    return [reported("pulls: seconds of a delta", _middle(run, "a delta", "pull_delta", "pull_whole"), whole)]


_JUDGED = {VERSIONS: _judge_versions, TRAINING: _judge_training, PULLS: _judge_pulls}


def _middle(run: Run, name: str, above: str, below: str) -> Measured | Missing:
    found = ratios(run, above, below)
    return Measured(name, median(found)) if found else f"{name}: no {above} was measured"


def _picture(seconds: Mapping[str, Sequence[float]]) -> Any:
    picture = new_figure(11, 1.2 + 0.35 * len(seconds))
    axis = picture.subplots()
    for place, found in enumerate(seconds.values()):
        axis.plot(found, [place] * len(found), "o", markersize=4)
    axis.set_yticks(range(len(seconds)), [*seconds], fontsize=8)
    axis.set_xlim(left=0)
    axis.invert_yaxis()
    axis.set_xlabel("seconds")
    without_frame(axis)
    return picture
