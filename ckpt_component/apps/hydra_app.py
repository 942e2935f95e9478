"""What our Hydra apps, `ckpt-train` and `ckpt-bench`, begin with."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import hydra
from omegaconf import DictConfig

from ..config import config_dir
from ..config.hints import command_line


def run_app(config_name: str, task: Callable[[DictConfig], Any], roots: Sequence[str]) -> None:
    """Run the command line.

    Args:
        config_name: the config that the app starts from.
        task: what runs, once for each job.
        roots: the keys and groups that an override may begin with.
    """
    # Hydra 1.4 warns of every target in a config that is on no list. A list of ours would shut out a user's callbacks.
    warnings.filterwarnings("ignore", message=r".*_target_='ckpt_component\.apps\.sweeps\.callback\.")
    # Hydra 1.4 has this as its only behaviour, and warns of the argument.
    version = {"version_base": "1.3"} if hydra.__version__ < "1.4" else {}
    with command_line(roots):
        hydra.main(config_path=str(config_dir()), config_name=config_name, **version)(task)()
