"""A save and a restore work wherever they are called: under any default of torch and any mode, or refuse in words."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import run_program
from strides import in_turn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ckpt_component import CheckpointError, build_checkpointer, build_manager, load_weights

SCRIPTS = Path(__file__).parent / "scripts"
PRESETS = ("sync", "async_persistent", "async_zero_overhead")
WAYS = [(preset, writer) for preset in PRESETS for writer in ("dcp", "torch_save")] + [(PRESETS[1], "safetensors")]


class PassedOperations(TorchDispatchMode):
    """Passes every operation on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class PassedFunctions(TorchFunctionMode):
    """Passes every function on."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


#: What is made on `meta` has no memory, so each tensor of ours that does not say where it is to be fails.
SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default device": lambda: default_device("meta"),
    "with device": lambda: torch.device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "inference mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "dispatch mode": PassedOperations,
    "function mode": PassedFunctions,
    "no functions": torch._C.DisableTorchFunction,
    "deterministic": deterministic,
}
#: All surroundings in each run, each with one way to save.
CASES = [
    case
    for number, name in enumerate(SURROUNDINGS)
    for case in in_turn([(name, *WAYS[(number + turn) % len(WAYS)]) for turn in range(len(WAYS))], len(WAYS))
]


def made(value: float, *shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.full(shape, value, dtype=dtype, device=device)


def module_of(value: float, device: str = "cpu") -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).to(device)
    with torch.no_grad():
        for each in model.parameters():
            each.fill_(value)
    return model


def train(state: dict[str, Any]) -> None:
    """One step, in the surroundings of a script that trains."""
    state["model"](made(1, 4, 8, device=state["large"].device.type)).square().sum().backward()
    state["optimizer"].step()


def state_of(value: float, writer: str = "dcp", device: str = "cpu") -> dict[str, Any]:
    """A state of each kind of value; for `dcp` with more small tensors than one system call takes.

    The optimizer has no step.
    """
    model, small = module_of(value, device), 1100 if writer == "dcp" else 30
    tensors = {
        "large": made(value, 300_000, device=device),
        "strided": made(value, 3, 4, device=device).cumsum(0).t(),
        "half": made(value, 5, dtype=torch.bfloat16, device=device),
        "double": made(value / 3, 5, dtype=torch.float64),
        "complex": made(value, 3, dtype=torch.complex64),
        "flag": made(value, dtype=torch.bool),
        "empty": made(value, 0),
        "many": {f"{number}": made(value + number, 3, device=device) for number in range(small)},
    }
    if writer == "safetensors":
        return {"model": model, **tensors}
    optimizer = torch.optim.AdamW(model.parameters(), lr=(1 + value) / 100)
    return {
        "model": model,
        "optimizer": optimizer,
        **tensors,
        "step": value,
        "pair": (value, made(value, 2)),
        "on": [1],
    }


def flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a state, by name."""
    value = value.state_dict() if hasattr(value, "state_dict") else value
    if isinstance(value, (dict, list, tuple)):
        for name, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flat(each, f"{key}.{name}")
    else:
        yield key, value


def differing(expected: Any, found: Any, *, device: str | None = None) -> list[str]:
    """Names of the values that differ, in dtype, place or bytes; `device`: where all of `found` are to be."""
    one, other = dict(flat(expected)), dict(flat(found))
    differ = sorted(one.keys() ^ other.keys())
    for name, value in one.items() if not differ else ():
        got = other[name]
        if isinstance(value, torch.Tensor):
            place = torch.device(device or value.device.type).type
            same = isinstance(got, torch.Tensor) and (got.dtype, got.device.type) == (value.dtype, place)
            if not same or not torch.equal(got.cpu(), value.cpu()):
                differ.append(name)
        elif got != value:
            differ.append(name)
    return differ


def save_and_restore(
    inside: Callable[[], AbstractContextManager[Any]], preset: str, writer: str, root: Path, device: str = "cpu"
) -> None:
    """Save inside, outside and inside the surroundings; restore and load inside; and train on outside."""
    overrides = [f"checkpoint/writer={writer}", "checkpoint.durability=process_crash"]
    state, fresh, model = state_of(3, writer, device), state_of(0, writer, device), module_of(0, device)
    trains = "optimizer" in state
    if trains:
        train(state)
    expected = {}
    with ExitStack() as stack:
        for step in (1, 2, 3):
            with contextlib.nullcontext() if step == 2 else inside():
                if step == 1:
                    manager = stack.enter_context(build_manager(preset, overrides, dir=root))
                assert manager.save(step, state)
                manager.wait_staged()
            expected[step] = {name: value.clone() for name, value in flat(state) if isinstance(value, torch.Tensor)}
            with torch.no_grad():
                state["large"].add_(1)
                state["strided"].mul_(2)
                state["many"]["7"].add_(1)
        with inside():
            manager.wait()
    with inside():
        with build_manager(preset, overrides, dir=root) as manager:
            assert manager.restore(fresh) == 3
            paths = [manager.path_of(step) for step in (1, 2, 3)]
        with build_checkpointer(preset, overrides) as checkpointer:
            loaded = [checkpointer.load(path) for path in paths]
            assert all(map(checkpointer.verify, paths))
        assert load_weights(model, paths[0]) == 1
    for step, values in enumerate(loaded, 1):
        tensors = {name: value for name, value in flat(values) if isinstance(value, torch.Tensor)}
        assert not differing(expected[step], tensors, device="cpu"), step
    assert not differing(expected[3], {name: value for name, value in flat(fresh) if isinstance(value, torch.Tensor)})
    assert not differing(state["model"], model)
    if trains:
        state["optimizer"].zero_grad()
        train(state)
        train(fresh)
    unchanged = state.keys() - {"large", "strided", "many"}
    assert not differing({name: state[name] for name in unchanged}, {name: fresh[name] for name in unchanged})


@pytest.mark.slow
@pytest.mark.parametrize(("name", "preset", "writer"), CASES)
def test_a_save_and_a_restore_do_not_depend_on_what_is_set_around_them(
    name: str, preset: str, writer: str, tmp_path: Path
) -> None:
    save_and_restore(SURROUNDINGS[name], preset, writer, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("preset", "writer"), WAYS)
def test_a_save_and_a_restore_work_with_cuda_as_the_default_device(
    preset: str, writer: str, device: str, tmp_path: Path
) -> None:
    save_and_restore(lambda: default_device("cuda"), preset, writer, tmp_path, device)


def test_fake_tensors_are_refused_in_words(tmp_path: Path) -> None:
    state, fresh = {"weight": made(1, 5)}, {"weight": made(0, 5)}
    with build_manager("async_persistent", dir=tmp_path) as manager, build_checkpointer("sync") as checkpointer:
        manager.save(1, state)
        manager.wait()
        for mode in (FakeTensorMode(), FakeTensorMode(allow_non_fake_inputs=True)):
            for call in (
                lambda: manager.save(2, state),
                lambda: manager.restore(fresh),
                lambda: checkpointer.load(tmp_path),
                lambda: load_weights(fresh, tmp_path, key=""),
            ):
                with mode, pytest.raises(CheckpointError, match="makes each tensor a FakeTensor, which has no memory"):
                    call()
        with FakeTensorMode():
            fake = {"weight": torch.ones(5)}
        with pytest.raises(CheckpointError, match="'weight' is a FakeTensor, .*cannot be checkpointed"):
            manager.save(2, fake)
        assert manager.steps() == [1] and not fresh["weight"].any()
        assert manager.restore(fresh) == 1 and fresh["weight"].all()


def test_a_model_that_was_made_in_inference_mode_is_filled_there(tmp_path: Path) -> None:
    with build_checkpointer("sync") as checkpointer:
        checkpointer.save({"model": {"turned": made(2, 3, 4), "flat": made(2, 5)}}, tmp_path / "one")
        with torch.inference_mode():
            state = {"turned": made(0, 4, 3).t(), "flat": made(0, 5, dtype=torch.float64)}
            load_weights(state, tmp_path / "one", allow_dtype_cast=True)
        assert all(value.eq(2).all() for value in state.values())
        checkpointer.save({"model": state}, tmp_path / "two")
        assert not differing({"model": state}, checkpointer.load(tmp_path / "two"))


@pytest.mark.slow
@pytest.mark.parametrize("preset", in_turn(PRESETS, len(PRESETS)))
def test_tensors_of_a_device_mesh_are_saved_and_loaded_there_too(preset: str, tmp_path: Path) -> None:
    done = run_program([str(SCRIPTS / "placed.py"), preset], tmp_path)
    assert done.returncode == 0 and "restored one\nrestored two\n" in done.stdout, done.stdout


@pytest.mark.parametrize("preset", in_turn(["sync", "async_temporal", "async_persistent", "async_zero_overhead"], 2))
def test_a_thread_that_saves_while_the_interpreter_ends_gets_an_answer(preset: str, tmp_path: Path) -> None:
    done = run_program([str(SCRIPTS / "ending.py"), preset], tmp_path, timeout=60)
    answer = "Nothing is saved or loaded any more, because the interpreter is ending"
    assert done.returncode == 0 and f"save: {answer}" in done.stdout, done.stdout
    assert f"load: {answer}" in done.stdout or "load: 21 values" in done.stdout, done.stdout
    with build_manager("sync", dir=tmp_path / "run") as manager, build_checkpointer("sync") as checkpointer:
        assert manager.steps()
        assert all(checkpointer.verify(manager.path_of(step)) for step in manager.steps())
    assert not [name for name in os.listdir(tmp_path / "run") if name.startswith(".ckpt-tmp")]
