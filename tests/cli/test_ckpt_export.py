"""`ckpt export`: what it writes loads elsewhere with equal values, whole or not at all."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, load_model

from ckpt_component import build_checkpointer
from ckpt_component.cli.app import main
from ckpt_component.core.storage.locate import storage_at
from ckpt_component.exporting import blocks
from ckpt_component.exporting.blocks import TensorBlocks
from ckpt_component.formats import Contents, Entry, StoredRange


def ckpt(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main([*map(str, arguments)])
    assert isinstance(left.value.code, int)
    return left.value.code, *capsys.readouterr()


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.embedding = torch.nn.Embedding(50, 8)
        self.head = torch.nn.Linear(8, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("none", torch.zeros(0, 3))


@pytest.fixture(scope="module")
def model() -> Tied:
    torch.manual_seed(0)
    return Tied()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, model: Tied) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "iter_0000007"
    state = {
        "model": model,
        "optimizer": {"groups": [{"lr": 0.1, "params": [0, 1]}], "exp": [torch.ones(3)]},
        "step": 7,
        "rng": (torch.arange(3), 1),
    }
    with build_checkpointer("sync", ["checkpoint.durability=process_crash"]) as checkpointer:
        checkpointer.save(state, folder)
    return folder


@pytest.fixture
def saved(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / checkpoint.name))


def test_a_hugging_face_folder_has_the_model_in_shards(
    saved: Path, model: Tied, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text('{"model_type": "tied", "dtype": "float32"}')
    (base / "tokenizer.json").write_text("{}")
    (base / "model.safetensors").write_bytes(b"others")
    out = tmp_path / "out"
    code, text, error = ckpt(
        capsys, "export", "hf", saved, out, "--max-shard-size", "500", "--config-from", base, "--json"
    )
    assert (code, error) == (0, "")
    told = json.loads(text)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    loaded = {name: tensor for shard in sorted(out.glob("*.safetensors")) for name, tensor in load_file(shard).items()}
    expected = model.state_dict()
    del expected["head.weight"]  # as transformers saves it: under its first name
    assert told["tied"] == {"head.weight": "embedding.weight"}
    assert index["weight_map"].keys() == loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    assert sorted(told["files"]) == sorted(path.name for path in out.iterdir())
    assert len({*index["weight_map"].values()}) > 2
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    assert (out / "tokenizer.json").exists()
    assert os.listdir(tmp_path) and not [name for name in os.listdir(tmp_path) if name.startswith(".ckpt")]


@pytest.mark.parametrize(
    "state",
    [
        {"model": {"wte.weight": torch.ones(3), "h.0.weight": torch.zeros(2)}},
        {"wte.weight": torch.ones(3), "h.0.weight": torch.zeros(2)},
    ],
    ids=["nested", "flat"],
)
def test_a_state_of_a_model_alone_has_the_names_of_the_model(
    state: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with build_checkpointer("sync") as checkpointer:
        checkpointer.save(state, tmp_path / "saved")
    assert ckpt(capsys, "export", "hf", tmp_path / "saved", tmp_path / "out")[0] == 0
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"wte.weight", "h.0.weight"}


def test_names_that_begin_with_model_stay_if_the_state_is_flat(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"model.embed_tokens.weight", "model.norm.weight"}  # of a Llama without its head
    with build_checkpointer("sync") as checkpointer:
        checkpointer.save({name: torch.ones(3) for name in names}, tmp_path / "saved")
    assert ckpt(capsys, "export", "hf", tmp_path / "saved", tmp_path / "out")[0] == 0
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == names


def test_safetensors_with_renames_and_dtype(
    saved: Path, model: Tied, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "weights.safetensors"
    arguments = ("export", "safetensors", saved, out, "--prefix", "model.", "--dtype", "bfloat16")
    assert ckpt(capsys, *arguments, "--rename", "body.*.weight=layers.*.w")[0] == 0
    assert load_file(out)["layers.1.w"].equal(model.state_dict()["body.1.weight"].bfloat16())
    assert load_file(out)["steps"].equal(model.state_dict()["steps"])
    code, _, error = ckpt(capsys, *arguments)
    assert code == 2 and "already exists" in error and "--replace" in error
    for inside in (saved, tmp_path / "link"):
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(saved)
        code, _, error = ckpt(capsys, *arguments[:3], inside / "weights.safetensors", "--prefix", "model.")
        assert code == 2 and f"is in the checkpoint {saved.resolve()}, which does not change; name another." in error
    assert ckpt(capsys, *arguments[:-1], "float32", "--replace")[0] == 0
    other = Tied()
    load_model(other, out)  # safetensors' own way to load tied tensors
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


def test_torch_save_has_the_nested_state_and_its_objects(
    saved: Path, model: Tied, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "all.pt"
    assert ckpt(capsys, "export", "torch", saved, out)[0] == 0
    for mmap in (False, True):
        state = torch.load(out, weights_only=True, mmap=mmap)
        assert {*state} == {"model", "optimizer", "step", "rng"}
        assert state["rng"][0].equal(torch.arange(3)) and state["rng"][1] == 1  # a tensor inside an object
        assert state["step"] == 7 and state["optimizer"]["groups"] == [{"lr": 0.1, "params": [0, 1]}]
        assert torch.equal(state["optimizer"]["exp"][0], torch.ones(3))
        assert type(state["model"]) is type(model.state_dict())
        assert all(torch.equal(value, state["model"][name]) for name, value in model.state_dict().items())
        tied = state["model"]["head.weight"], state["model"]["embedding.weight"]
        assert tied[0].data_ptr() == tied[1].data_ptr()


@pytest.mark.parametrize("prefix", [(), ("--prefix", "a")], ids=["all", "prefix"])
def test_torch_save_has_the_empty_dicts_too(
    prefix: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {
        "a": {"state": {}, "left": {"x": {}, "y": torch.ones(1)}, "w": torch.ones(2)},
        "b": {},
    }  # as of an optimizer without momentum
    with build_checkpointer("sync") as checkpointer:
        checkpointer.save(state, tmp_path / "saved")
    ignore = "left" if prefix else "a.left"
    assert ckpt(capsys, "export", "torch", tmp_path / "saved", tmp_path / "out.pt", *prefix, "--ignore", ignore)[0] == 0
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert (loaded if prefix else loaded["a"])["state"] == {}
    assert loaded.keys() == ({"state", "w"} if prefix else {"a", "b"}) and "left" not in loaded.get("a", {})


def test_a_damaged_checkpoint_is_refused_and_leaves_nothing(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = max(saved.glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    out = tmp_path / "out"
    code, _, error = ckpt(capsys, "export", "hf", saved, out)
    assert code == 2 and "is damaged" in error and file.name in error
    assert sorted(os.listdir(tmp_path)) == ["iter_0000007"]


def test_a_killed_export_is_invisible_and_the_next_one_cleans_up(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "ckpt_component.cli", "export", "hf", str(saved), str(out)]
    log = tmp_path / "log"
    killed = {"CKPT_FAILPOINT": "write:nth=3:action=kill", "CKPT_FAILPOINT_LOG": str(log)}
    done = subprocess.run(command, env={**os.environ, **killed}, capture_output=True, timeout=60, check=False)
    assert done.returncode == -9, done.stderr
    (left,) = [name for name in os.listdir(tmp_path) if name.startswith(".ckpt")]
    assert left.startswith(".ckpt-tmp.out.") and not out.exists()
    os.utime(tmp_path / left, (1, 1))  # a young one might not be locked yet
    assert ckpt(capsys, "export", "hf", saved, out)[0] == 0
    assert (out / "model.safetensors").exists()
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".ckpt")]


def test_only_an_export_is_replaced(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for target in (saved, saved.parent, tmp_path / "empty"):
        target.mkdir(exist_ok=True)
        code, _, error = ckpt(capsys, "export", "hf", saved, target, "--replace")
        assert code == 2 and "is not an export of hf" in error
    (tmp_path / "notes.txt").write_text("mine")
    assert ckpt(capsys, "export", "safetensors", saved, tmp_path / "notes.txt", "--replace")[0] == 2
    assert (tmp_path / "notes.txt").read_text() == "mine"
    out = tmp_path / "out"
    for dtype in ("float32", "float16"):
        assert ckpt(capsys, "export", "hf", saved, out, "--replace", "--dtype", dtype)[0] == 0
    assert load_file(out / "model.safetensors")["body.0.bias"].dtype == torch.float16
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".ckpt")]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["hff", "CKPT", "OUT"], "Did you mean hf?"),
        (["hf", "CKPT", "OUT", "--prefix", "modle."], "Did you mean 'model'?"),
        (["hf", "CKPT", "OUT", "--ignore", "hed"], "Did you mean 'head'?"),
        (["hf", "CKPT", "OUT", "--rename", "body.0=body.1"], "ignore=['body.0.weight']"),
        (["hf", "CKPT", "OUT", "--rename", "bdy=layers"], "Did you mean 'body'?"),
        (["hf", "CKPT", "OUT", "--rename", "body"], "--rename=body has no new name"),
        (["hf", "CKPT", "OUT", "--dtype", "bfloat1"], "Did you mean --dtype=bfloat16?"),
        (
            ["hf", "CKPT", "OUT", "--prefix", "", "--ignore", "model", "--ignore", "optimizer.exp"],
            "no tensor to export",
        ),
        (["torch", "CKPT", "OUT", "--config-from", "base"], "is for the format hf"),
        (["hf", "CKPT", "OUT", "--config-from", "."], "has no config.json"),
        (["hf", "nowhere", "OUT"], "nowhere does not exist"),
    ],
)
def test_what_is_mistyped_is_told_in_two_lines(
    arguments: list[str], text: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"CKPT": str(saved), "OUT": str(tmp_path / "out")}
    code, _, error = ckpt(capsys, "export", *(names.get(word, word) for word in arguments))
    assert code == 2 and text in error and len(error) < 400, error
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_another_program_is_read_by_torch(
    model: Tied, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"w": torch.arange(12.0).view(3, 4).t(), "n": 3}, tmp_path / "theirs.pt")
    out = tmp_path / "out.safetensors"
    code, _, error = ckpt(capsys, "export", "safetensors", tmp_path / "theirs.pt", out)
    assert code == 0, error
    assert load_file(out)["w"].equal(torch.arange(12.0).view(3, 4).t())


def test_other_views_of_one_storage_are_not_tied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = torch.arange(12.0).reshape(2, 6)
    torch.save({"a": whole.t()[:3], "b": whole.t()[3:], "c": whole.t()[:3]}, tmp_path / "views.pt")
    assert ckpt(capsys, "export", "safetensors", tmp_path / "views.pt", tmp_path / "out.safetensors")[0] == 0
    found = load_file(tmp_path / "out.safetensors")
    assert found.keys() == {"a", "b"}
    assert found["a"].equal(whole.t()[:3]) and found["b"].equal(whole.t()[3:])


@pytest.mark.parametrize("block", [64, 640])
def test_parts_of_ranks_are_put_together_in_small_blocks(block: int, tmp_path: Path) -> None:
    """Any box of any dimension, cut again and again, as shards of several parallel dimensions are."""
    chance = random.Random(block)
    shapes: list[tuple[int, ...]] = [(7,), (6, 5), (3, 4, 5), (2, 3, 4, 3), (5, 2, 1, 7)]
    for shape in shapes:
        whole = torch.arange(math.prod(shape), dtype=torch.int16).reshape(shape)
        boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((0,) * len(shape), shape)]
        for _ in range(6):
            offsets, sizes = boxes.pop(chance.randrange(len(boxes)))
            along = chance.randrange(len(shape))
            cut = chance.randint(0, sizes[along])
            for start, size in ((0, cut), (cut, sizes[along] - cut)):
                if size:
                    part = (*sizes[:along], size, *sizes[along + 1 :])
                    boxes.append(((*offsets[:along], offsets[along] + start, *offsets[along + 1 :]), part))
        chance.shuffle(boxes)
        pieces, data = [], b""
        for offsets, sizes in boxes:
            place = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
            payload = whole[place].contiguous().view(-1).view(torch.uint8)
            item = b"before" + bytes(payload.tolist()) + b"after"
            pieces.append(StoredRange("f", len(data), len(item), len(data) + 6, offsets, sizes, None, None))
            data += item
        (tmp_path / "f").write_bytes(data)
        entry = Entry("w", ("w",), "int16", shape, 2 * whole.numel(), tuple(pieces))
        index: Any = SimpleNamespace(storage=storage_at(tmp_path), folder=str(tmp_path), contents=Contents.of([entry]))
        with TensorBlocks(index, [entry], block) as blocks:
            parts = [bytes(each) for each in blocks.of(entry)]
        assert max(map(len, parts)) <= block
        assert torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.int16).equal(whole.view(-1))


@pytest.mark.parametrize("source", blocks.FLOATS)
@pytest.mark.parametrize("target", blocks.FLOATS)
def test_conversions_are_those_of_torch(source: str, target: str) -> None:
    torch.manual_seed(0)
    special = [
        0.0,
        -0.0,
        math.inf,
        -math.inf,
        math.nan,
        1e300,
        -1e300,
        65504,
        65520,
        1e-8,
        3.3895e38,
        1.00390625,
        5e-324,
    ]
    kinds = getattr(torch, source), getattr(torch, target)
    values = torch.cat([torch.tensor(special, dtype=torch.float64), torch.randn(1000).double() * 100]).to(kinds[0])
    block = memoryview(bytearray(values.view(torch.uint8).tolist()))
    cast: Any = blocks.caster(source, target) or bytes
    made = torch.frombuffer(bytearray(cast(block)), dtype=kinds[1])
    assert torch.equal(made.double().nan_to_num(12.5), values.to(kinds[1]).double().nan_to_num(12.5))


def test_torch_is_not_imported(saved: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom ckpt_component.cli.app import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit as left: assert not left.code\n"
        "assert not {'torch', 'hydra', 'omegaconf'} & sys.modules.keys()"
    )
    arguments = ["export", "hf", str(saved), str(tmp_path / "out"), "--dtype", "bfloat16", "-q"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.turns(3)
@pytest.mark.slow
def test_shards_of_several_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = Path(__file__).parents[1] / "saving" / "scripts" / "sharded.py"
    run_ranks(script, "save_sharded", 2, tmp_path)
    folder = tmp_path / "shared_memory"
    assert ckpt(capsys, "export", "safetensors", folder, tmp_path / "out")[0] == 0
    with build_checkpointer("sync") as checkpointer:
        whole = checkpointer.load(folder)
    exported = load_file(tmp_path / "out")
    for key in ("rows", "columns", "alike", "square", "few"):
        assert exported[key].equal(whole[key])
