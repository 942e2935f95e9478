"""A model on the meta device gets its memory from the checkpoint: the same model that an initialised one becomes."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from packed import Packed, PackedMomentum
from ranks import run_ranks
from snapshots import MEMORY
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ckpt_component import (
    CheckpointConfigError,
    CheckpointCorruptError,
    CheckpointListener,
    CheckpointLoadError,
    LoadReport,
    MissingKeysError,
    build_checkpointer,
    build_manager,
    load_weights,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
QUICK = ["checkpoint.durability=process_crash", "checkpoint.save.at_end=false"]


class Model(nn.Module):
    """Tied weights, a recurrent layer, buffers of both kinds, and a parameter that does not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.shift = nn.Parameter(torch.linspace(0, 1, 8), requires_grad=False)
        self.register_buffer("scale", torch.linspace(1, 2, 8), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out, _ = self.recurrent(self.embedding(tokens))
        return self.head(self.norm((out * self.scale + self.shift)[:, -1]))  # type: ignore[no-any-return]

    def set_buffers(self) -> None:
        self.scale = torch.linspace(1, 2, 8)


def on_meta(make: Callable[[], nn.Module] = Model) -> Any:
    with torch.device("meta"):
        return make()


def devices(module: nn.Module) -> set[str]:
    return {tensor.device.type for tensor in [*module.parameters(), *module.buffers()]}


def state_of(model: nn.Module, kind: Any = torch.optim.AdamW, **options: Any) -> dict[str, Any]:
    return {"model": model, "optimizer": kind(model.parameters(), **options)}


def train(state: dict[str, Any], steps: Sequence[int]) -> list[float]:
    losses = []
    for step in steps:
        tokens = torch.randint(0, 10, (4, 5), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(state["model"](tokens), tokens[:, 0])
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        losses.append(float(loss.detach()))
    return losses


class Source(CheckpointListener):
    """Where the last restore was from."""

    source: str | None = None

    def on_restored(self, report: LoadReport) -> None:
        self.source = report.source


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["foreach", "fused"])
def test_the_next_three_losses_are_those_of_the_uninterrupted_run(
    options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(1)
    whole = state_of(Model(), **options)
    train(whole, range(3))
    with build_manager("async_persistent", QUICK, dir=tmp_path / "run") as manager:
        manager.save(3, whole)
        manager.wait()
    right = train(whole, range(3, 6))
    model = on_meta()
    state = state_of(model, **options)
    parameters = dict(model.named_parameters())
    with build_manager("async_persistent", QUICK, dir=tmp_path / "run") as manager:
        assert manager.restore(state) == 3
    assert all(each is parameters[name] for name, each in model.named_parameters()), "the optimizer has these"
    assert model.head.weight is model.embedding.weight and not model.shift.requires_grad
    said = [each.getMessage() for each in caplog.records if "meta device" in each.getMessage()]
    assert len(said) == 1 and "model.scale; checkpoints do not have them, so set them before" in said[0]
    assert model.scale.is_meta
    model.set_buffers()
    assert devices(model) == {"cpu"} and train(state, range(3, 6)) == right


def test_from_memory_and_after_a_damaged_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, whole = Source(), {"model": nn.Linear(3, 3)}
    quiet = [*QUICK, *MEMORY, "checkpoint.save.every_steps=100"]
    with build_manager("async_persistent", quiet, dir=tmp_path / "run") as manager:
        manager.add_listener(source)
        manager.maybe_save(1, whole)
        manager.wait()
        first = whole["model"].weight.detach().clone()
        model = on_meta(lambda: nn.Linear(3, 3))
        assert manager.restore({"model": model}) == 1 and model.weight.equal(first)
        manager.wait()
        assert source.source == "memory"
    with build_manager("sync", QUICK, dir=tmp_path / "disk") as manager:
        for step in (1, 2):
            manager.save(step, whole)
            nn.init.zeros_(whole["model"].weight)
        for file in Path(manager.path_of(2)).glob("*.distcp"):
            file.write_bytes(bytes(file.stat().st_size))
        model = on_meta(lambda: nn.Linear(3, 3))
        assert manager.restore({"model": model}) == 1 and model.weight.equal(first)
    with build_manager("sync", [*QUICK, "checkpoint.verify=on_read"], dir=tmp_path / "disk") as manager:
        for file in Path(manager.path_of(1)).glob("*.distcp"):
            file.write_bytes(bytes(file.stat().st_size))
        model = on_meta(lambda: nn.Linear(3, 3))
        with pytest.raises(CheckpointCorruptError):
            manager.restore({"model": model})
        assert devices(model) == {"meta"}, "so that the script can initialise it"


def test_without_a_checkpoint_the_script_initialises(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = on_meta()
    state = state_of(model)
    with build_manager("sync", QUICK, dir=tmp_path / "run") as manager:
        assert manager.restore(state) is None and devices(model) == {"meta"}
        assert not any(record.levelno >= logging.WARNING for record in caplog.records)
        fresh = state_of(Model())
        train(fresh, [1])
        manager.save(1, fresh)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A linear layer, as `model`."""
    with build_checkpointer("sync", QUICK[:1]) as checkpointer:
        checkpointer.save({"model": nn.Linear(3, 2)}, tmp_path / "saved")
    return tmp_path / "saved"


class More(nn.Linear):
    """A layer with more than is saved."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.new = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(
    ("make", "options", "kind", "told"),
    [
        (lambda: More(3, 2), {}, MissingKeysError, "model.new.*no values there.*memory and values first"),
        (lambda: More(3, 2), {"strict": True}, MissingKeysError, "model.new.*no values there"),
        (
            lambda: More(3, 2),
            {"ignore": ["model.new"]},
            CheckpointLoadError,
            "'model.new' is on .*ignore leaves it out",
        ),
        (
            lambda: nn.Linear(4, 2),
            {},
            CheckpointLoadError,
            r"'model.weight' has shape \(2, 4\) in the target and \(2, 3\)",
        ),
        (lambda: nn.Linear(3, 2).bfloat16(), {}, CheckpointLoadError, "torch.bfloat16 in the target"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_gets_memory(
    make: Callable[[], nn.Module], options: dict[str, Any], kind: Any, told: str, saved: Path
) -> None:
    model = on_meta(make)
    with build_checkpointer("sync") as checkpointer, pytest.raises(kind, match=told):
        checkpointer.load(saved, {"model": model}, **options)
    assert devices(model) == {"meta"}


def test_a_module_by_itself_and_its_weights_alone(saved: Path) -> None:
    with build_checkpointer("sync") as checkpointer:
        right = checkpointer.load(saved)["model"]
        model, converted = on_meta(lambda: nn.Linear(3, 2)), on_meta(lambda: nn.Linear(3, 2).bfloat16())
        weight = model.weight
        checkpointer.load(saved, model, rename={"model": ""})
        assert model.weight is weight and weight.equal(right["weight"]) and model.bias.equal(right["bias"])
        checkpointer.load(saved, {"model": converted}, allow_dtype_cast=True)
        assert converted.weight.equal(right["weight"].bfloat16()) and devices(converted) == {"cpu"}
    for device in (None, "cpu"):
        model = checkpoint_wrapper(on_meta(lambda: nn.Linear(3, 2)))
        load_weights(model, saved, device=device)
        assert all(each.equal(right[name.rpartition(".")[2]]) for name, each in model.named_parameters())


def test_where_memory_is_made(saved: Path) -> None:
    model = on_meta(lambda: nn.Linear(3, 2))
    told = r"default device: name one in checkpoint\.load\.device"
    with (
        torch.device("meta"),
        build_checkpointer("sync") as checkpointer,
        pytest.raises(CheckpointLoadError, match=told),
    ):
        checkpointer.load(saved, {"model": model})
    with torch.device("meta"), build_checkpointer("sync", ["checkpoint.load.device=cpu"]) as checkpointer:
        checkpointer.load(saved, {"model": model})
    assert devices(model) == {"cpu"}
    for wrong, told in (("gpu", "checkpoint.load.device='gpu'"), ("meta", "meta has no memory; try cpu or cuda")):
        with pytest.raises(CheckpointConfigError, match=told):
            build_checkpointer("sync", [f"checkpoint.load.device={wrong}"])
        with pytest.raises(CheckpointConfigError, match=told.replace("checkpoint.load.", "")):
            load_weights(model, saved, device=wrong)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_without_memory_leaves_all_on_meta(saved: Path) -> None:
    model = on_meta(lambda: nn.Linear(3, 2))
    told, named = r"got no memory: .*; see checkpoint\.load\.device", ["checkpoint.load.device=cuda"]
    with build_checkpointer("sync", named) as checkpointer, pytest.raises(CheckpointLoadError, match=told):
        checkpointer.load(saved, {"model": model})
    assert devices(model) == {"meta"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_by_name_or_by_default(tmp_path: Path) -> None:
    whole = state_of(Model().cuda())
    with build_checkpointer("sync") as checkpointer:
        checkpointer.save(whole, tmp_path / "saved")
    for overrides, default in ((["checkpoint.load.device=cuda"], "cpu"), ([], "cuda")):
        state = state_of(on_meta())
        torch.set_default_device(default)
        try:
            with build_checkpointer("sync", overrides) as checkpointer:
                checkpointer.load(tmp_path / "saved", state)
        finally:
            torch.set_default_device("cpu")
        for name, value in state["model"].state_dict().items():
            assert value.is_cuda and value.equal(whole["model"].state_dict()[name]), name


class Views(nn.Module):
    """Parameters that share memory without being the same, in part and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.arange(12.0).view(3, 4))
        self.turned = nn.Parameter(self.both.detach().t())
        self.row = nn.Parameter(self.both.detach()[1])


class Tagged(nn.Parameter):
    """A class of its own, as frameworks have."""


def test_shared_memory_attributes_and_hooks_stay(tmp_path: Path) -> None:
    seen: list[str] = []
    with build_checkpointer("sync", ["checkpoint.load.prove=on_read"]) as checkpointer:
        checkpointer.save({"model": Views()}, tmp_path / "views")
        model = on_meta(Views)
        model.both.sequence_parallel = True
        model.both.register_hook(lambda _: seen.append("gradient"))
        handle = model.both.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
        model.row = Tagged(model.row)
        checkpointer.load(tmp_path / "views", {"model": model}, strict=True)
    with torch.no_grad():
        model.both[1, 2] = 7.0
    assert model.turned[2, 1] == model.row[2] == 7.0 and model.turned.stride() == (1, 4)
    assert model.both.sequence_parallel and type(model.row) is Tagged and model.row.is_leaf
    model.both.sum().backward()
    assert seen == ["gradient", "accumulated"] and model.both.grad is not None
    handle.remove()
    model.both.sum().backward()
    assert seen == ["gradient", "accumulated", "gradient"]


def test_what_refers_to_a_parameter_weakly_is_refused_in_words(saved: Path) -> None:
    model = on_meta(lambda: nn.Linear(3, 2))
    reference = weakref.ref(model.weight)
    with build_checkpointer("sync") as checkpointer:
        with pytest.raises(CheckpointLoadError, match=r"model\.weight cannot get memory .*weak reference.*to_empty"):
            checkpointer.load(saved, {"model": model})
        assert devices(model) == {"meta"}
        del reference
        checkpointer.load(saved, {"model": model})
    assert devices(model) == {"cpu"}


def test_a_parameter_that_torch_holds_leaves_all_on_meta(saved: Path) -> None:
    model = on_meta(lambda: nn.Linear(3, 2))
    told = r"model\.bias cannot get memory .*a graph.*to_empty"
    with build_checkpointer("sync") as checkpointer:
        for held in (model.bias * model.bias, model.bias.view(2)):  # a hook of their graphs would not be called again
            with pytest.raises(CheckpointLoadError, match=told):
                checkpointer.load(saved, {"model": model})
            assert devices(model) == {"meta"} and held.grad_fn is not None
        del held
        checkpointer.load(saved, {"model": model})
    assert devices(model) == {"cpu"}


class Slotted(nn.Parameter):
    """A class that torch does not swap with another one."""

    __slots__ = ("place",)


def test_all_stay_on_meta_if_one_cannot_be_swapped(saved: Path) -> None:
    model = on_meta(lambda: nn.Linear(3, 2))
    model.bias = Slotted(model.bias.detach())
    weight = model.weight
    told = r"'model\.bias' cannot get memory .*slots; give the module"
    with build_checkpointer("sync") as checkpointer, pytest.raises(CheckpointLoadError, match=told):
        checkpointer.load(saved, {"model": model})
    assert devices(model) == {"meta"} and model.weight is weight


def test_a_tied_weight_that_is_stored_once_and_state_from_the_start(tmp_path: Path) -> None:
    whole = state_of(Model(), torch.optim.Adagrad)
    train(whole, [1, 2])
    with build_checkpointer("sync", ["checkpoint.load.prove=on_read"]) as checkpointer:
        checkpointer.save(whole, tmp_path / "saved")
        right = train(whole, [3, 4])
        state = state_of(on_meta(), torch.optim.Adagrad)
        checkpointer.load(tmp_path / "saved", state, strict=True)
        state["model"].set_buffers()
        assert train(state, [3, 4]) == right
        once = {name: value for name, value in whole["model"].state_dict().items() if name != "head.weight"}
        checkpointer.save({"model": once}, tmp_path / "once")
        model = on_meta()
        checkpointer.load(tmp_path / "once", {"model": model}, strict=True)
    assert model.head.weight is model.embedding.weight and model.head.weight.equal(once["embedding.weight"])


def test_a_state_dict_of_such_a_module_is_refused(saved: Path) -> None:
    model = on_meta(lambda: nn.Linear(3, 2))
    told = "pass the module itself, which then gets memory"
    with build_checkpointer("sync") as checkpointer, pytest.raises(CheckpointLoadError, match=told):
        checkpointer.load(saved, {"model": model.state_dict()})


def test_parameters_of_an_optimizer_that_are_not_in_the_state_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with build_checkpointer("sync") as checkpointer:
        one, other = nn.Linear(2, 2), nn.Linear(2, 2)
        optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()])
        checkpointer.save({"model": one, "optimizer": optimizer}, tmp_path / "saved")
        one, other = on_meta(lambda: nn.Linear(2, 2)), on_meta(lambda: nn.Linear(2, 2))
        optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()])
        checkpointer.load(tmp_path / "saved", {"model": one, "optimizer": optimizer})
    assert "'optimizer' has 2 parameter(s) on the meta device that are in no module of the state" in caplog.text


def test_state_and_weights_that_are_made_of_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(inner: Any, context: Any, size: Any, stride: Any) -> Packed:
        return Packed(inner["codes"], inner["scale"], inner["table"], *context)

    monkeypatch.setattr(Packed, "__tensor_unflatten__", made)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            codes = torch.arange(16, dtype=torch.int8).view(4, 4)
            packed = Packed(codes, torch.ones(4), torch.arange(3.0), 4, torch.float32)
            self.packed = nn.Parameter(packed, requires_grad=False)
            self.weight = nn.Parameter(torch.ones(4, 4))

    whole = state_of(Layer(), PackedMomentum)
    whole["model"].weight.grad = torch.full((4, 4), 0.5)
    whole["optimizer"].step()
    with build_checkpointer("sync", ["checkpoint.load.prove=on_read"]) as checkpointer:
        checkpointer.save(whole, tmp_path / "saved")
        state = state_of(on_meta(Layer), PackedMomentum)
        packed = state["model"].packed
        checkpointer.load(tmp_path / "saved", state, strict=True)
    model = state["model"]
    assert model.packed is packed and not packed.is_meta and type(packed) is Packed
    assert all(map(torch.equal, packed.parts(), whole["model"].packed.parts()))
    momentum = state["optimizer"].state[model.weight]["momentum"]
    right = whole["optimizer"].state[whole["model"].weight]["momentum"]
    assert all(map(torch.equal, momentum.parts(), right.parts())) and model.weight.equal(whole["model"].weight)


@pytest.mark.parametrize("form", ["torch_save", "safetensors", "stock", "file"])
def test_every_format_fills_it(form: str, tmp_path: Path) -> None:
    whole = {"model": nn.Linear(3, 3)}
    path = tmp_path / "saved"
    if form == "stock":
        dcp.save({"model": whole["model"].state_dict()}, checkpoint_id=path)
    elif form == "file":
        torch.save({"model": whole["model"].state_dict()}, path)
    else:
        with build_checkpointer("sync", [f"checkpoint/writer={form}"]) as checkpointer:
            checkpointer.save(whole, path)
    model = on_meta(lambda: nn.Linear(3, 3))
    with build_checkpointer("sync") as checkpointer:
        checkpointer.load(path, {"model": model}, strict=True)
    assert model.weight.equal(whole["model"].weight)


class Adapted(nn.Module):
    """A frozen base, and what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(3, 3).requires_grad_(False)
        self.adapter = nn.Linear(3, 3)


def test_frozen_parameters_get_memory_if_they_were_stored(tmp_path: Path) -> None:
    skips, whole = [*QUICK, "checkpoint.save.frozen=skip"], Adapted()
    with build_manager("sync", skips, dir=tmp_path / "skipped") as manager:
        manager.restore({"model": whole})
        manager.save(1, {"model": whole})
        model = on_meta(Adapted)
        with pytest.raises(
            CheckpointLoadError, match=r"2 of 2 frozen .* on the meta device.*load the base model before"
        ):
            manager.restore({"model": model})
        assert devices(model) == {"meta"}
    with build_manager("sync", QUICK, dir=tmp_path / "kept") as manager:
        manager.save(1, {"model": whole})
    for step in (1, 2):  # the script does not make them again, so they are stored again
        with build_manager("sync", skips, dir=tmp_path / "kept") as manager:
            model = on_meta(Adapted)
            assert manager.restore({"model": model}) == step and model.base.weight.equal(whole.base.weight)
            manager.save(step + 1, {"model": model})


SCRIPT = Path(__file__).parent / "scripts" / "meta_ranks.py"


@pytest.mark.slow
def test_shards_of_two_ranks_with_tied_weights_go_on_as_they_were(tmp_path: Path) -> None:
    run_ranks(SCRIPT, "resume", 2, tmp_path)


@pytest.mark.slow
def test_shards_are_loaded_by_another_number_of_ranks_and_by_one_that_does_not_fit(tmp_path: Path) -> None:
    run_ranks(SCRIPT, "save", 2, tmp_path)
    run_ranks(SCRIPT, "resized", 3, tmp_path)
    run_ranks(SCRIPT, "one_does_not_fit", 2, tmp_path)
