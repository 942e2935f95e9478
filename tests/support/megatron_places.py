"""Where the tests find megatron-core: installed, and in the folders that `CKPT_TEST_MEGATRON` lists.

0.16.1 is the last release for Python 3.11. 0.19.2 asks for 3.12 but runs on 3.11 too, from its unpacked wheel, with
triton, which torch for CUDA brings along:

    pip download --no-deps --python-version 3.12 --only-binary=:all: megatron-core==0.19.2
    unzip -d megatron-0.19.2 megatron_core-0.19.2*.whl
    pip install --no-deps triton
    CKPT_TEST_MEGATRON=megatron-0.19.2 pytest --run-slow -m slow tests/megatron

A checkout of Megatron-LM can be listed as well.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

#: PYTHONPATH of each; empty for the installed one.
PLACES = ["", *filter(None, os.environ.get("CKPT_TEST_MEGATRON", "").split(os.pathsep))]


def name_of(place: str) -> str:
    return Path(place).name or "installed"


def package_of(place: str) -> Path | None:
    """The folder `megatron` in a place; found without importing it."""
    if place:
        return Path(place) / "megatron"
    spec = importlib.util.find_spec("megatron")
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    return next((folder for folder in folders if (folder / "core").is_dir()), None)
