"""A real megatron-core saves through `dist_checkpointing.save(..., async_sharded_save=True)` and loads it back."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from ranks import run_ranks

SCRIPT = Path(__file__).with_name("megatron_save.py")


def why_not() -> str | None:
    """None where megatron-core can be imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import megatron.core.dist_checkpointing  # noqa: F401
        except ImportError as error:
            return f"needs megatron-core (pip install --no-deps megatron-core==0.16.1): {error}"
    return None


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("function", ["ours", "megatrons_writer"])
def test_megatron_core_saves_and_loads(function: str, world_size: int, tmp_path: Path) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    run_ranks(SCRIPT, function, world_size, tmp_path, timeout=240)
