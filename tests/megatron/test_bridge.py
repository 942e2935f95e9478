"""`ckpt_component.megatron.bridge.Manager` in the real Megatron-Bridge; see `bridge_save` for what stands for what.

Bridge needs Python 3.12 and NVRx, so its wheel is unpacked, together with that of megatron-core 0.19 (and triton):

    pip download --no-deps --python-version 3.12 --only-binary=:all: megatron-bridge==0.6.2 megatron-core==0.19.2
    for wheel in megatron_*.whl; do unzip -qod bridge-0.6.2 $wheel; done
    CKPT_TEST_BRIDGE=bridge-0.6.2 pytest --run-slow -m slow tests/megatron/test_bridge.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ranks import run_ranks

BRIDGE = os.environ.get("CKPT_TEST_BRIDGE", "")


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.skipif(not BRIDGE, reason="needs an unpacked megatron-bridge in CKPT_TEST_BRIDGE")
@pytest.mark.parametrize("function", ["installed", "made_by_the_manager"])
def test_bridge_saves_and_loads(function: str, tmp_path: Path) -> None:
    folder = Path(__file__).parent
    path = os.pathsep.join([BRIDGE, str(folder)])
    run_ranks(folder / "bridge_save.py", function, 2, tmp_path, timeout=360, PYTHONPATH=path)
