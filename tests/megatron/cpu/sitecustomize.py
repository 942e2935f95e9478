"""Puts a program that needs CUDA on the CPU, and watches Megatron-LM's training loop; for tests.

Python imports this at its start if this folder is on PYTHONPATH, in every process that the program starts too:

    PYTHONPATH=tests/megatron/cpu:MEGATRON_LM torchrun --nproc-per-node 2 pretrain_gpt.py ARGUMENTS

LOOP_LOSSES=FILE: rank 0 appends a line for each iteration: its number, and the losses with all their bits.
LOOP_KILL=N: every rank kills itself (SIGKILL) when it has scheduled the save of iteration N, while that is written.
LOOP_KILL_WRITER=N: rank 1 kills the process that writes its files, while that has the save of iteration N to write.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import signal
import sys
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

Patch = Callable[[Any], None]


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module when that has been imported, whoever imports it and in whatever order."""

    def __init__(self, patches: dict[str, Patch]) -> None:
        self._patches = patches

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        patch = self._patches.pop(fullname, None)
        if patch is None:
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def record_losses(training: Any) -> None:
    """Each call of Megatron's `train_step` writes what it returned; and no device is asked for."""
    training.initialize_megatron = functools.partial(training.initialize_megatron, allow_no_cuda=True)
    train_step = training.train_step
    path = os.environ.get("LOOP_LOSSES")

    def recorded(*args: Any, **kwargs: Any) -> Any:
        result = train_step(*args, **kwargs)
        iteration = training.get_args().curr_iteration + 1
        if path and os.environ["RANK"] == "0":
            losses = " ".join(f"{name}={float(value).hex()}" for name, value in sorted(result[0].items()))
            with open(path, "a") as file:
                file.write(f"{iteration} {losses}\n")
        return result

    training.train_step = recorded


def kill_while_saving(async_utils: Any) -> None:
    """What LOOP_KILL and LOOP_KILL_WRITER ask for; the save is scheduled, and no rank can finalize it."""
    schedule = async_utils.schedule_async_save
    ranks, writer = (int(os.environ.get(name, "0")) for name in ("LOOP_KILL", "LOOP_KILL_WRITER"))

    def scheduled(*args: Any, **kwargs: Any) -> Any:
        options = async_utils.get_args()
        iteration = options.curr_iteration + 1
        victims = _writers() if iteration == writer and options.rank == 1 else []
        for victim in victims:
            victim.suspend()
        result = schedule(*args, **kwargs)
        for victim in victims:
            victim.kill()
        if iteration == ranks:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which torchrun sends when the first has died
            _await(os.path.join(options.save, f"iter_{iteration:07d}", f"__{options.rank}_0.distcp"))
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    async_utils.schedule_async_save = scheduled


def _writers() -> list[Any]:
    import psutil

    children = psutil.Process().children()
    writers = [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]
    assert writers, children
    return writers


def _await(file: str) -> None:
    """The first of its bytes may be there; the wait has an end, and the test then says what is missing."""
    deadline = time.monotonic() + 60
    while not os.path.exists(file) and time.monotonic() < deadline:
        time.sleep(0.0005)


def compile_nothing(utils: Any) -> None:
    """Megatron compiles its index builder when it starts; ours takes its place."""
    utils.compile_helpers = lambda: None
    sys.modules["megatron.core.datasets.helpers_cpp"] = index_builder()


def with_torchs_adam(distrib_optimizer: Any) -> None:
    """Where neither Apex nor Transformer Engine is, Megatron cannot resume its distributed optimizer.

    It asks for the step of a state that is empty before the load, and takes the steps from before the load.
    """
    import torch

    cls = distrib_optimizer.DistributedOptimizer
    state_dict, load_state_dict = cls.state_dict, cls.load_state_dict

    def filled_state_dict(self: Any) -> Any:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if not self.optimizer.state[parameter]:
                    zeros = {name: torch.zeros_like(parameter.data) for name in ("exp_avg", "exp_avg_sq")}
                    self.optimizer.state[parameter].update(step=torch.tensor(0.0), **zeros)
        return state_dict(self)

    def load_with_step(self: Any, state: Any) -> None:
        step = state["optimizer"]["param_groups"][0]["step"]
        load_state_dict(self, state)
        for values in self.optimizer.state.values():
            values["step"] = torch.tensor(float(step))

    cls.state_dict, cls.load_state_dict = filled_state_dict, load_with_step


def load_nothing(fused_kernels: Any) -> None:
    """Until 0.16 Megatron also compiles kernels of CUDA when it starts, which are not called here."""
    fused_kernels.load = lambda args: None


def index_builder() -> Any:
    """Stands in for Megatron's module in C++ that cuts documents into samples, so that nothing is compiled here."""
    import numpy as np

    module: Any = types.ModuleType("megatron.core.datasets.helpers_cpp")

    def build_sample_idx(
        sizes: Any,
        documents: Any,
        length: int,
        epochs: int,
        tokens_per_epoch: int,
        drop: bool = True,
        extra: bool = True,
    ) -> Any:
        ends = np.cumsum(sizes[documents], dtype=np.int64)
        samples = (epochs * tokens_per_epoch - int(extra)) // length
        starts = np.minimum(np.arange(samples + 1, dtype=np.int64) * length, ends[-1] - 1)
        numbers = np.searchsorted(ends, starts, side="right")
        offsets = starts - (ends - sizes[documents])[numbers]
        return np.stack([numbers, offsets], axis=1).astype(documents.dtype)

    module.build_sample_idx_int32 = module.build_sample_idx_int64 = build_sample_idx
    return module


def pretend_cuda(torch: Any) -> None:
    """Only now, so that processes without torch stay without."""
    from pretended_cuda import pretend_cuda

    pretend_cuda()


sys.meta_path.insert(
    0,
    AfterImport(
        {
            "torch": pretend_cuda,
            "megatron.core.datasets.utils": compile_nothing,
            "megatron.core.optimizer.distrib_optimizer": with_torchs_adam,
            "megatron.legacy.fused_kernels": load_nothing,
            "megatron.training.training": record_losses,
            "megatron.training.async_utils": kill_while_saving,
        }
    ),
)
