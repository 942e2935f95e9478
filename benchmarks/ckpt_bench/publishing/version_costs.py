"""What a delta is beside a whole version, and what publishing it costs beside a full export of the same checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from ckpt_component.publishing.delta import TensorDelta

from .background_work import NICE
from .changing_weights import ChangingWeights, bytes_of
from .delta_parts import BLOCK_BYTES, Parts
from .published_run import PublishedRun
from .spent import Spent, SpentClock

_ENCODING = "xor"


def measure_versions(state: str, pairs: int, folder: str) -> Iterator[dict[str, Any]]:
    """Publish and export checkpoints in turn, of which each differs from the one before in some elements.

    Args:
        state: name of the state
        pairs: number of deltas
        folder: for the run

    Yields:
        `bytes` of the weights; `whole_bytes` and `whole`, seconds, of the first version; and of each turn, as lists:
        `delta_bytes`; `publish` and `export`, seconds of their processes; `floor`, of `Parts`, and of each part; the
        same with `_cpu`, CPU seconds; and `encode_cpu`, CPU seconds of the encoding alone.
    """
    os.nice(NICE - os.nice(0))  # the parts get as much of busy cores as the processes
    with PublishedRun(state, folder) as run, Parts(run.weights, os.path.join(folder, "parts")) as parts:
        run.save()
        run.settle()
        whole = run.publish()
        yield {"bytes": run.weights.nbytes, "whole_bytes": whole.answer["nbytes"], "whole": [whole.spent.seconds]}
        turns: dict[str, list[float]] = {}
        for number in range(pairs):
            old = [tensor.clone() for tensor in run.weights.tensors]
            run.save()
            encode_cpu = _encode_cpu(run.weights, [*map(bytes_of, old)])
            del old
            turn = {"encode_cpu": encode_cpu, **_turn(run, parts, export_first=number % 2 == 0)}
            for name, value in turn.items():
                turns.setdefault(name, []).append(value)
            yield turns


def _turn(run: PublishedRun, parts: Parts, *, export_first: bool) -> dict[str, float]:
    works = {"export": run.export, "publish": run.publish}
    done = {}
    for name in works if export_first else reversed(works):
        run.settle()
        done[name] = works[name]()
    delta = done["publish"].answer
    if delta["is_whole"]:
        raise RuntimeError(f"version {delta['version']} is whole, and no delta")
    run.settle()
    spent = parts.measure(run.path)
    spent["floor"] = Spent(*map(sum, zip(*spent.values(), strict=True)))
    spent |= {name: work.spent for name, work in done.items()}
    return {
        "delta_bytes": delta["nbytes"],
        **{name: each.seconds for name, each in spent.items()},
        **{f"{name}_cpu": each.cpu_s for name, each in spent.items()},
    }


def _encode_cpu(weights: ChangingWeights, old: list[memoryview]) -> float:
    """CPU seconds of encoding all weights in memory."""
    clock = SpentClock()
    for tensor, before in zip(weights.tensors, old, strict=True):
        new, delta = bytes_of(tensor), TensorDelta(_ENCODING, tensor.nbytes)
        for start in range(0, len(new), BLOCK_BYTES):
            delta.add(new[start : start + BLOCK_BYTES], before[start : start + BLOCK_BYTES])
        delta.finish()
    return clock.spent().cpu_s
