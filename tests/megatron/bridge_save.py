"""Megatron-Bridge's own manager code with `checkpoint.custom_manager_class: ckpt_component.megatron.bridge.Manager`.

Bridge asks for some forty packages and a GPU. What runs here is the code of its training package that makes the manager,
the queue and the requests (`create_checkpoint_manager`, `GlobalState`, `schedule_async_save`, `maybe_finalize_async_save`)
and the real dist_checkpointing of megatron-core. In place of packages that are not installed, and of Bridge's models,
stand modules that have any name. `save_checkpoint`, which puts the state of a model together, is replaced by a save of
`megatron_save.sharded_state`.
"""

from __future__ import annotations

import importlib.util
import sys
import types
import typing
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
import typing_extensions
from megatron_save import check, new_folder, save, sharded_state

import ckpt_component
import ckpt_component.megatron

#: Packages that Bridge imports, stood for where they are missing.
PACKAGES = [
    "transformers",
    "modelopt",
    "datasets",
    "diffusers",
    "peft",
    "accelerate",
    "mistral_common",
    "tensorboard",
    "wandb",
    "tqdm",
    "nemo_run",
    "fla",
    "qwen_vl_utils",
    "timm",
    "open_clip",
    "mlflow",
    "comet_ml",
    "torchvision",
    "einops",
    "rich",
    "six",
    "regex",
    "requests",
    "huggingface_hub",
    "tokenizers",
    "sentencepiece",
    "tiktoken",
    "numba",
]
#: Stood for in any case.
PARTS = {f"megatron.bridge.{part}" for part in ("models", "diffusion", "data", "peft", "recipes")}
MANAGER = "ckpt_component.megatron.bridge.Manager"


class AnyModule(types.ModuleType):
    """Each name is a class that takes any arguments."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__init__": lambda *_a, **_k: None, "__module__": self.__name__})
        setattr(self, name, made)
        return made


class AnyModules(MetaPathFinder, Loader):
    def __init__(self) -> None:
        self._packages = {name for name in PACKAGES if importlib.util.find_spec(name) is None}

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        is_part = ".".join(fullname.split(".")[:3]) in {*PARTS, "torch.utils.tensorboard"}
        if is_part or fullname.partition(".")[0] in self._packages:
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return AnyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def bridge() -> Any:
    """The checkpointing module of Bridge."""
    if not hasattr(typing, "override"):  # Bridge asks for Python 3.12
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    sys.meta_path.insert(0, AnyModules())
    from megatron.bridge.training import checkpointing

    def save_checkpoint(state: Any, checkpointing_context: Any, **context: Any) -> None:
        assert checkpointing_context == {} and context["callback_manager"] is None
        value, path = context["model"]
        values = sharded_state(dist.get_rank(), dist.get_world_size(), value)
        request = save(values, path, state.cfg.checkpoint.async_save, state.cfg.checkpoint.async_strategy)
        checkpointing.schedule_async_save(state, request)
        values["column"].data.fill_(-5.0)

    checkpointing.save_checkpoint = save_checkpoint
    return checkpointing


def train(bridge: Any, state: Any, manager: Any, folder: Path) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for iteration in (1, 2):
        model = (float(iteration), new_folder(folder, iteration, rank))
        context = bridge.CheckpointSaveContext(
            state=state, model=model, optimizer=None, opt_param_scheduler=None, num_floating_point_operations_so_far=0
        )
        manager.save(context, None)
        manager.finalize_async_saves(state)
    assert isinstance(state.async_calls_queue, ckpt_component.AsyncCallsQueue)
    manager.finalize_async_saves(state, blocking=True, terminate=True)
    for iteration in (1, 2):
        check(folder / f"iter_{iteration:07d}", rank, world, float(iteration))


def state_of(folder: Path) -> Any:
    from megatron.bridge.training.config import CheckpointConfig
    from megatron.bridge.training.state import GlobalState

    state = GlobalState()
    state._cfg = SimpleNamespace(
        checkpoint=CheckpointConfig(
            save=str(folder), async_save=True, use_persistent_ckpt_worker=True, custom_manager_class=MANAGER
        )
    )
    return state


def installed(rank: int, world: int, folder: Path) -> None:
    """`install()` in the script, or `python -m ckpt_component.megatron`, before Bridge is imported."""
    ckpt_component.megatron.install()
    checkpointing = bridge()
    state = state_of(folder)
    state.initialize_async_checkpoint_worker()
    manager = checkpointing.create_checkpoint_manager(state.cfg.checkpoint)
    assert type(manager).__module__ == "ckpt_component.megatron.bridge"
    train(checkpointing, state, manager, folder)


def made_by_the_manager(rank: int, world: int, folder: Path) -> None:
    """Bridge is set up with another queue already; the manager is made by hand, which needs no allowed name."""
    checkpointing = bridge()
    state = state_of(folder)
    closed: list[int] = []
    state._async_calls_queue = SimpleNamespace(close=lambda: closed.append(1))
    from ckpt_component.megatron.bridge import Manager

    train(checkpointing, state, Manager(state.cfg.checkpoint), folder)
    assert closed == [1]
