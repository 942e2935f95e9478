"""Query the CUDA device in a separate process, because the benchmark itself does not import torch."""

from __future__ import annotations

import subprocess
import sys

from ckpt_component.config.hydra.hydra_errors import HydraConfigError

_ASK_SECONDS = 120
_PROBE = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"


def device_name() -> str:
    """The name of the CUDA device; empty without one."""
    done = subprocess.run(
        [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=_ASK_SECONDS, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""


def require_cuda() -> None:
    """Raise CheckpointConfigError if torch sees no CUDA device."""
    if not device_name():
        raise HydraConfigError("device=cuda: torch sees no CUDA device here; use device=cpu, or a machine with one.")
