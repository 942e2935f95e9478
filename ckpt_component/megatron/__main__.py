"""Run a Megatron training script with the asynchronous saves of this package.

python -m ckpt_component.megatron [--checkpoint-override KEY=VALUE]... SCRIPT ARGUMENTS
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from ..errors import CheckpointError


def main() -> None:
    """Install the hooks and run the script as `__main__`."""
    parser = argparse.ArgumentParser(
        prog="python -m ckpt_component.megatron",
        usage="%(prog)s [--checkpoint-override KEY=VALUE]... SCRIPT ARGUMENTS",  # one line, so that an error has two
        description="Run a Megatron training script with the asynchronous saves of ckpt_component.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--checkpoint-override",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a config override such as checkpoint.timeouts.write=1h; takes precedence over Megatron's options; "
        "may be repeated",
    )
    parser.add_argument("script", help="the training script, such as pretrain_gpt.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    options = parser.parse_args()
    if not os.path.isfile(options.script):
        parser.error(f"there is no script {options.script!r}; the script's own options must follow its name")
    from .installing import install  # imports torch

    try:
        install(options.checkpoint_override)
    except CheckpointError as error:
        parser.error(str(error))
    sys.argv = [options.script, *options.arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(options.script)))
    runpy.run_path(options.script, run_name="__main__")


if __name__ == "__main__":
    main()
