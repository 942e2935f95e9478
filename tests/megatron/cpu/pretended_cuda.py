"""Programs that say "cuda" run on the CPU: what a test needs to run Megatron-LM's own training loop without a GPU.

Tensors that are asked for on a CUDA device are made on the CPU; streams and events do nothing; the generator of the
device is the one of the CPU. `torch.cuda.is_available()` stays False, for what it says is true.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import typing
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
import torch.utils._triton
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class _OnCpu(TorchFunctionMode):
    """Puts on the CPU what is asked for on a CUDA device, by keyword, by position, or by `.cuda()`."""

    _of_the_cpu = torch.Generator()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.random_ and kwargs.get("generator") is None:
            # A data loader draws a seed; where there are two generators, the device's does not notice.
            kwargs = kwargs | {"generator": self._of_the_cpu}
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's distributed optimizer takes no other types than those of CUDA.
            return str(func(*args)).replace("torch.", "torch.cuda.")
        if _is_cuda(kwargs.get("device")) or isinstance(kwargs.get("device"), int):
            kwargs = kwargs | {"device": _CPU}
        if func is torch.Tensor.to:
            args = tuple(_CPU if _is_cuda(arg) or type(arg) is int else arg for arg in args)
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


class _Nothing:
    """A stream or an event: all that was asked of it is done already."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = _CPU

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def record_event(self, event: Any = None) -> _Nothing:
        return self

    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, event: Any) -> float:
        return 0.0


def pretend_cuda() -> None:
    """From here on this process has one device per rank, which is the CPU, and NCCL is gloo.

    Call it before anything of Megatron is imported.
    """
    _OnCpu().__enter__()  # type: ignore[no-untyped-call]
    cuda: Any = torch.cuda
    properties = SimpleNamespace(
        name="CPU", major=8, minor=0, total_memory=1 << 34, multi_processor_count=1, L2_cache_size=1 << 20
    )
    nothing = {
        "set_device": None,
        "synchronize": None,
        "empty_cache": None,
        "ipc_collect": None,
        "set_stream": None,
        "reset_peak_memory_stats": None,
        "init": None,
        "device_count": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "current_device": int(os.environ.get("LOCAL_RANK", "0")),
        "get_device_capability": (properties.major, properties.minor),
        "get_device_name": properties.name,
        "get_device_properties": properties,
        "mem_get_info": (properties.total_memory, properties.total_memory),
    }
    for name, value in nothing.items():
        setattr(cuda, name, lambda *args, value=value, **kwargs: value)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *args, **kwargs: 0)
    cuda.Stream = cuda.Event = _Nothing
    stream = _Nothing()
    cuda.current_stream = cuda.default_stream = lambda device=None: stream
    cuda.stream = cuda.device = lambda *args: contextlib.nullcontext()
    for where in (cuda, cuda.random):
        where.get_rng_state = lambda device=None: torch.get_rng_state()
        where.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
        where.manual_seed = where.manual_seed_all = torch.default_generator.manual_seed
    cuda.default_generators = (torch.default_generator,) * 64
    cuda._lazy_call = lambda callback, **kwargs: callback()
    _gloo_for_nccl()
    _stand_ins()


def _stand_ins() -> None:
    """Megatron imports triton, for kernels that are not called here, and from 0.18 on names of Python 3.12."""
    if not hasattr(typing, "override"):
        typing.override = lambda method: method  # type: ignore[attr-defined]
    if importlib.util.find_spec("triton") is None:
        torch.utils._triton.has_triton_package()  # the answer is kept, and stays no
        for name in ("triton", "triton.language"):
            sys.modules[name] = MagicMock(name=name, __version__="3.6.0")


def _gloo_for_nccl() -> None:
    init = dist.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
        init("gloo", *args, **kwargs)

    dist.init_process_group = init_process_group
