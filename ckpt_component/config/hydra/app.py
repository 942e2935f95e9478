"""Common entry point of our Hydra apps, `ckpt-train` and `ckpt-bench`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import hydra
from omegaconf import DictConfig

from .. import config_dir
from .hints import command_line


def run_app(config_name: str, task: Callable[[DictConfig], Any], roots: Sequence[str]) -> None:
    """Run the command line.

    Args:
        config_name: the app's primary config
        task: the function to run for each job
        roots: top-level keys and groups that overrides may begin with
    """
    # Hydra 1.4 warns of every target that is not on an allowlist. A list of ours would exclude users' callbacks.
    warnings.filterwarnings("ignore", message=r".*_target_='ckpt_component\.cli\.reports\.callback\.")
    # Hydra 1.4 has only this behaviour, and warns about the argument.
    version = {"version_base": "1.3"} if hydra.__version__ < "1.4" else {}
    with command_line(roots):
        hydra.main(config_path=str(config_dir()), config_name=config_name, **version)(task)()
