"""What `install()` does to packages of the same names and shape as Megatron and NVRx, written by `fake_packages`.

Each function runs in a process of its own, with the packages on its path.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from time import sleep
from typing import Any

import ckpt_component
import ckpt_component.megatron
from ckpt_component.megatron.taken_names import NAMES

STRATEGIES = "megatron.core.dist_checkpointing.strategies"
#: The strategy of Megatron main; the direct imports are those of later sources.
TORCH = """
from .async_utils import AsyncRequest
from .nvrx import has_nvrx_async_support
HAVE_NVRX = has_nvrx_async_support()
def get_async_strategy(async_strategy="nvrx", module=None):
    if async_strategy == "nvrx":
        from nvidia_resiliency_ext.checkpointing.async_ckpt.cached_metadata_filesystem_reader import (
            CachedMetadataFileSystemReader)
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
        from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import (
            FileSystemWriterAsync, _results_queue, get_write_results_queue)
        from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
            CheckpointMetadataCache, save_state_dict_async_finalize, save_state_dict_async_plan)
    else:
        from .async_utils import AsyncCallsQueue, AsyncRequest
        from .cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
        from .filesystem_async import FileSystemWriterAsync, _results_queue, get_write_results_queue
        from .state_dict_saver import save_state_dict_async_finalize, save_state_dict_async_plan
    modules = {name: value for name, value in locals().items() if name not in ("async_strategy", "module")}
    return async_strategy, modules[module] if module else modules
"""
NVRX = """
from importlib import import_module
def has_nvrx_async_support():
    try:
        import_module("nvidia_resiliency_ext.checkpointing.async_ckpt.core")
    except ImportError:
        return False
    raise AssertionError("Minimum required nvidia-resiliency-ext package version is 0.6.0.")
"""
ASYNC_UTILS = """
from megatron.core.dist_checkpointing.strategies.torch import get_async_strategy
try:
    from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import _results_queue
    from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import save_state_dict_async_finalize
except ImportError:
    from megatron.core.dist_checkpointing.strategies.filesystem_async import _results_queue
    from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_finalize
"""
#: As NVRx's code for restarts within the process.
ABORT = """
def abort_nvrx_checkpoint():
    for queue in AsyncCallsQueue.get_instances():
        queue.close(abort=True)
"""
CLASSES = {
    "async_utils": "class AsyncCallsQueue: pass\nclass AsyncRequest: pass\n",
    "cached_metadata_filesystem_reader": "class CachedMetadataFileSystemReader: pass\n",
    "filesystem_async": "class FileSystemWriterAsync: pass\n_results_queue = None\ndef get_write_results_queue(): pass\n",
    "state_dict_saver": "def save_state_dict_async_plan(): pass\ndef save_state_dict_async_finalize(): pass\n",
}


def write(folder: Path, module: str, text: str) -> None:
    file = folder.joinpath(*module.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True, exist_ok=True)
    for package in file.relative_to(folder).parents[:-1]:
        (folder / package / "__init__.py").touch()  # else an installed Megatron would come first
    file.write_text(text)


def fake_megatron(folder: Path, torch: str = TORCH) -> None:
    for name, text in CLASSES.items():
        write(folder, f"{STRATEGIES}.{name}", text)
    write(folder, f"{STRATEGIES}.nvrx", NVRX)
    write(folder, f"{STRATEGIES}.torch", torch)
    write(folder, "megatron.core.package_info", "__version__ = '0.99'\n")
    write(folder, "megatron.training.async_utils", ASYNC_UTILS)
    sys.path.insert(0, str(folder))


def fake_nvrx(folder: Path) -> None:
    """A release that is installed, older than Megatron asks for, without a version and one of the modules."""
    for name in ("async_utils", "filesystem_async", "state_dict_saver"):
        module = "core" if name == "async_utils" else name
        write(folder, f"nvidia_resiliency_ext.checkpointing.async_ckpt.{module}", CLASSES[name] + ABORT)
    sys.path.insert(0, str(folder))


def get_async_strategy(name: str) -> dict[str, Any]:
    module = importlib.import_module("megatron.training.async_utils")
    strategy, names = module.get_async_strategy(name)
    assert strategy == name
    return dict(names)


def check() -> None:
    nvrx, mcore = get_async_strategy("nvrx"), get_async_strategy("mcore")
    assert nvrx.keys() == {*NAMES} and mcore.keys() == {*NAMES} - {"CheckpointMetadataCache"}
    assert issubclass(nvrx["AsyncCallsQueue"], ckpt_component.AsyncCallsQueue)
    assert issubclass(nvrx["FileSystemWriterAsync"], ckpt_component.FileSystemWriterAsync)
    assert all(mcore[name] is nvrx[name] for name in mcore if name != "save_state_dict_async_plan")
    assert all(str(value.__module__).startswith("ckpt_component.") for value in nvrx.values() if value is not None)
    training = importlib.import_module("megatron.training.async_utils")
    assert training.save_state_dict_async_finalize is ckpt_component.save_state_dict_async_finalize
    torch = importlib.import_module(f"{STRATEGIES}.torch")
    assert torch.HAVE_NVRX is True and torch.AsyncRequest is ckpt_component.AsyncRequest


def before(rank: int, world: int, folder: Path) -> None:
    fake_megatron(folder)
    ckpt_component.megatron.install()
    check()
    # As other code asks for NVRx: what is not there stays absent.
    package = importlib.import_module("nvidia_resiliency_ext")
    assert package.__version__.startswith("0.7.0+")
    for absent in ("nvidia_resiliency_ext.inprocess", "nvidia_resiliency_ext.checkpointing.local"):
        try:
            importlib.import_module(absent)
        except ModuleNotFoundError as error:
            assert error.name == absent
        else:
            raise AssertionError(absent)


def after(rank: int, world: int, folder: Path) -> None:
    fake_megatron(folder)
    importlib.import_module("megatron.training.async_utils")
    ckpt_component.megatron.install()
    ckpt_component.megatron.install()
    check()


def with_nvrx_before(rank: int, world: int, folder: Path) -> None:
    fake_megatron(folder)
    fake_nvrx(folder)
    ckpt_component.megatron.install()
    check()
    core = importlib.import_module("nvidia_resiliency_ext.checkpointing.async_ckpt.core")
    assert str(core.__file__).startswith(str(folder))
    calls = core.AsyncCallsQueue(persistent=True)
    calls.schedule_async_request(core.AsyncRequest(sleep, (60,)))
    core.abort_nvrx_checkpoint()
    assert calls.get_num_unfinalized_calls() == 0


def with_nvrx_after(rank: int, world: int, folder: Path) -> None:
    fake_megatron(folder)
    fake_nvrx(folder)
    sys.modules[f"{STRATEGIES}.nvrx"] = types.ModuleType("nvrx")
    vars(sys.modules[f"{STRATEGIES}.nvrx"])["has_nvrx_async_support"] = lambda: True
    importlib.import_module("megatron.training.async_utils")
    ckpt_component.megatron.install()
    check()


def error_of(call: Any) -> str:
    try:
        call()
    except ckpt_component.megatron.MegatronNameError as error:
        assert isinstance(error, ImportError) and isinstance(error, ckpt_component.CheckpointError)
        return str(error)
    raise AssertionError("nothing was raised")


def unknown_names(rank: int, world: int, folder: Path) -> None:
    """A strategy that takes one more; before, after, and by an import of its own."""
    newer = TORCH.replace("AsyncCallsQueue, AsyncRequest\n", "AsyncCallsQueue, AsyncRequest, AsyncThing\n", 1)
    assert newer != TORCH
    fake_megatron(folder, newer)
    write(folder, "megatron.training.later", "from nvidia_resiliency_ext.checkpointing.async_ckpt.core import Later\n")
    ckpt_component.megatron.install()
    text = error_of(lambda: importlib.import_module(f"{STRATEGIES}.torch"))
    assert text.splitlines()[0].startswith("megatron-core 0.99 takes AsyncThing from its async strategy"), text
    assert text.endswith("or run the script without ckpt_component.megatron (with NVRx).")
    text = error_of(lambda: importlib.import_module("megatron.training.later"))
    assert text.splitlines()[0].startswith("megatron-core 0.99 takes Later from its async strategy"), text


def unknown_names_after(rank: int, world: int, folder: Path) -> None:
    fake_megatron(folder, TORCH.replace("_results_queue, get", "_other_queue, get"))
    importlib.import_module(f"{STRATEGIES}.torch")
    assert "takes _other_queue from" in error_of(ckpt_component.megatron.install)
    assert not any(type(finder).__module__.startswith("ckpt_component") for finder in sys.meta_path)


def another_structure(rank: int, world: int, folder: Path) -> None:
    """A Megatron that takes its classes from nowhere that is known."""
    fake_megatron(folder, "import json\n")
    ckpt_component.megatron.install()
    assert "megatron-core 0.99" in error_of(lambda: importlib.import_module(f"{STRATEGIES}.torch"))


def options(rank: int, world: int, folder: Path) -> None:
    """Megatron's options and overrides reach queues, processes and writers."""
    import psutil

    fake_megatron(folder)
    write(folder, "megatron.training.global_vars", "_GLOBAL_ARGS = None\n")
    ckpt_component.megatron.install(["checkpoint.timeouts.write=2s", "checkpoint.durability=process_crash"])
    variables = importlib.import_module("megatron.training.global_vars")
    given = {"async_save": True, "dist_ckpt_workers": 3, "async_ckpt_cpu_priority": 12, "async_ckpt_io_priority": 3}
    vars(variables)["_GLOBAL_ARGS"] = types.SimpleNamespace(save=str(folder / "it's here"), **given)
    names = get_async_strategy("nvrx")
    writer = names["FileSystemWriterAsync"](folder, thread_count=1, use_cached_data_structure=True)
    assert (writer.thread_count, writer.sync_files) == (3, False)
    names["AsyncCallsQueue"].warmup_persistent_caller(0, cpu_priority=12, io_priority=3, cpu_shm_mode=False)
    children = psutil.Process().children()
    calls = names["AsyncCallsQueue"](persistent=True, cpu_shm_mode=False)
    calls.schedule_async_request(names["AsyncRequest"](print, ("from the worker",)))
    assert calls.maybe_finalize_async_calls(blocking=True) == [0]
    # The process that was warmed up, and no other.
    assert psutil.Process().children() == children
    worker = children[-1]
    assert worker.nice() == 12 and worker.ionice().ioclass == psutil.IOPRIO_CLASS_IDLE
    calls.close()
    assert not worker.is_running()
    calls = names["AsyncCallsQueue"](persistent=True)
    calls.schedule_async_request(names["AsyncRequest"](sleep, (60,)))
    try:
        calls.maybe_finalize_async_calls(blocking=True)
    except ckpt_component.CheckpointTimeoutError as error:
        assert "within 2 s" in str(error), error
    else:
        raise AssertionError("a write without a deadline")
    calls.close()
    for wrong in ("checkpoint.keep.last=3", "checkpoint.timeout.write=3"):
        try:
            ckpt_component.megatron.install([wrong])
        except ckpt_component.CheckpointConfigError as error:
            print(error)
        else:
            raise AssertionError(wrong)
