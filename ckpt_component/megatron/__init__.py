"""Megatron's own training loop with the asynchronous saves of this package.

    torchrun --nproc-per-node 8 -m ckpt_component.megatron pretrain_gpt.py ...   # same arguments as before

    import ckpt_component.megatron                                               # the same inside a script
    ckpt_component.megatron.install()

The checkpoint format and loading remain Megatron's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core._lazy import lazy

if TYPE_CHECKING:
    from .installing import install as install
    from .taken_names import MegatronNameError as MegatronNameError

__all__, __getattr__, __dir__ = lazy(
    __name__,
    {
        ".installing": "install",
        ".taken_names": "MegatronNameError",
    },
)
