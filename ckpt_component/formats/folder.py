"""Folders of other programs: whether one holds a checkpoint, and which files it is made of."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.commit.names import SINGLE_FILES

METADATA = ".metadata"
#: Written last, and only by Megatron's distributed checkpoints.
MEGATRON_MARKER = "metadata.json"
#: Megatron's values that all ranks have: a file, or in newer releases an object.
MEGATRON_COMMON_FILE, MEGATRON_COMMON_KEY = "common.pt", "common_state/shard_0_1"
INDEX = ".safetensors.index.json"
#: Hugging Face's names of the weights, which other files may lie beside.
_WEIGHTS = ("model.safetensors", f"model{INDEX}", "pytorch_model.bin")


def is_readable(names: Sequence[str]) -> bool:
    """Whether a folder of another program with these names holds one checkpoint of a supported format."""
    return METADATA in names or weights_in(names) is not None


def weights_in(names: Sequence[str]) -> str | None:
    """The file to load from a folder with these names, or the index of several. None unless exactly one has weights."""
    for usual in _WEIGHTS:
        if usual in names:
            return usual
    for endings in (INDEX, SINGLE_FILES[:1], SINGLE_FILES[1:]):
        fitting = [name for name in names if name.endswith(endings)]
        if fitting:
            return fitting[0] if len(fitting) == 1 else None
    return None
