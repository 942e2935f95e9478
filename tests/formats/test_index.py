"""What the index lists of a checkpoint is what a load of it returns, for every format; and it needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckpt_component import (
    CheckpointCorruptError,
    CheckpointLoadError,
    CheckpointNotFoundError,
    build_checkpointer,
    compose_checkpoint,
)
from ckpt_component.core.commit.manifest import decode_manifest, encode_manifest
from ckpt_component.core.storage.checksum import find_checksum
from ckpt_component.core.storage.locate import storage_at
from ckpt_component.formats import Index, StoredRange, open_index
from ckpt_component.formats.index import contents_of
from ckpt_component.formats.rank_index import RankIndex, item_columns
from ckpt_component.formats.torch_archive import STORAGE_DTYPES
from ckpt_component.state.dtypes import SAFETENSORS, WIDTHS
from ckpt_component.state.flatten import flatten
from ckpt_component.state.paths import key_of


def opened(path: Path) -> Index:
    return open_index(storage_at(path), path)


def ranges_of(index: Index, key: str) -> tuple[StoredRange, ...]:
    return index.contents.ranges_at(index.entries[key].place)


def state() -> dict[str, Any]:
    weight = torch.arange(12.0).reshape(3, 4)
    return {
        "model": {
            "weight": weight,
            "tied": weight,
            "odd": torch.arange(6).reshape(2, 3).t(),
            "half": torch.ones(2).half(),
        },
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp": torch.ones(2, 0)}}, "groups": [{"lr": 0.1}, 5]},
        "float8": torch.ones(4).to(torch.float8_e4m3fn),
        "epoch": 7,
        "names": ["a", "b"],
    }


def tensors_only() -> dict[str, Any]:
    return {"model": {"weight": torch.arange(12.0).reshape(3, 4), "bias": torch.ones(5, dtype=torch.bfloat16)}}


def of_writer(writer: str, made: Callable[[], dict[str, Any]]) -> Callable[[Path], Path]:
    def save(folder: Path) -> Path:
        build_checkpointer("sync", overrides=[f"checkpoint/writer={writer}"]).save(made(), folder / "iter_0000200")
        return folder / "iter_0000200"

    return save


def stock_dcp(folder: Path) -> Path:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it has no process group
        dcp.save(state(), checkpoint_id=folder / "step-30", no_dist=True)
    return folder / "step-30"


def torch_file(folder: Path) -> Path:
    torch.save(state(), folder / "step_5.pt")
    return folder / "step_5.pt"


def safetensors_file(folder: Path) -> Path:
    save_file(tensors_only()["model"], folder / "model.safetensors")
    return folder


def safetensors_index(folder: Path) -> Path:
    parts = {
        f"model-{number}.safetensors": {key: tensor}
        for number, (key, tensor) in enumerate(tensors_only()["model"].items())
    }
    for name, part in parts.items():
        save_file(part, folder / name)
    weight_map = {key: name for name, part in parts.items() for key in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


FORMS: dict[str, tuple[Callable[[Path], Path], int | None, bool]] = {
    "dcp": (of_writer("dcp", state), 200, True),
    "torch_save": (of_writer("torch_save", state), 200, True),
    "safetensors": (of_writer("safetensors", tensors_only), 200, True),
    "dcp (torch)": (stock_dcp, 30, False),
    "torch_save (file)": (torch_file, 5, True),
    "safetensors (file)": (safetensors_file, None, False),
    "safetensors (index)": (safetensors_index, None, False),
}


@pytest.mark.parametrize("form", FORMS)
def test_lists_what_a_load_returns(form: str, tmp_path: Path) -> None:
    save, step, verified = FORMS[form]
    path = save(tmp_path)
    index = opened(path)
    flat = flatten(build_checkpointer("sync").load(path))
    loaded = {key_of(place): (place, tensor) for place, tensor in zip(flat.tensor_paths, flat.tensors, strict=True)}
    tensors = {key: entry for key, entry in index.entries.items() if entry.kind == "tensor"}
    assert tensors.keys() == loaded.keys()
    for key, entry in tensors.items():
        place, tensor = loaded[key]
        assert entry.path == place and entry.key == key
        assert f"torch.{entry.dtype}" == str(tensor.dtype) and entry.shape == tuple(tensor.shape)
        assert entry.nbytes == tensor.numel() * tensor.element_size()
        (piece,) = ranges_of(index, key)
        if piece.payload is not None:
            data = (Path(index.folder) / piece.file).read_bytes()[piece.payload : piece.payload + entry.nbytes]
            assert data == bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())
    objects = {entry.path for entry in index.entries.values() if entry.kind == "object"}
    assert objects == set(flat.object_paths)
    assert (index.format, index.step, index.verified) == (form, step, verified)
    check_sums(index)


def check_sums(index: Index) -> None:
    """Every piece with a checksum has that of its bytes in the file."""
    for piece in index.ranges():
        assert (piece.checksum is not None) == index.verified
        if piece.checksum_kind is not None:
            data = (Path(index.folder) / piece.file).read_bytes()[piece.offset : piece.offset + piece.length]
            assert find_checksum(piece.checksum_kind).of(memoryview(data)) == piece.checksum


def test_tied_tensors_have_equal_pieces(tmp_path: Path) -> None:
    for form in ("dcp", "torch_save"):
        index = opened(FORMS[form][0](tmp_path / form))
        assert ranges_of(index, "model.weight") == ranges_of(index, "model.tied")


def test_files_of_another_program_are_listed_below_their_names(tmp_path: Path) -> None:
    composed = compose_checkpoint("sync")
    composed.writer = {"_target_": "ckpt_component.writers.FilesWriter", "workers": 2}
    content = {"model.safetensors": tensors_only()["model"], "optimizer.pt": state()["optimizer"], "config.json": b"{}"}
    build_checkpointer(composed).save(content, tmp_path / "checkpoint-3")
    index = opened(tmp_path / "checkpoint-3")
    assert index.format == "files"
    assert index.entries["model.safetensors.weight"].path == ("model.safetensors", "weight")
    assert index.entries["optimizer.pt.state.0.step"].dtype == "float32"
    assert index.entries["config.json"].nbytes == 2
    check_sums(index)


def test_the_tables_of_dtypes_are_those_of_torch() -> None:
    dtypes = {str(value)[6:]: value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert {name: dtype.itemsize for name, dtype in dtypes.items()}.items() <= WIDTHS.items()
    for name in (*SAFETENSORS, *STORAGE_DTYPES.values()):
        assert name in WIDTHS


def test_needs_no_torch(tmp_path: Path) -> None:
    paths = []
    for form, (save, _, _) in FORMS.items():
        (tmp_path / form).mkdir()
        paths.append(str(save(tmp_path / form)))
    code = (
        "import sys\nfrom ckpt_component.formats import open_index\n"
        "from ckpt_component.core.storage.locate import storage_at\n"
        "for path in sys.argv[1:]: assert open_index(storage_at(path), path).entries\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, *paths], check=True, timeout=60)


def test_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint at"):
        opened(tmp_path / "none")
    with pytest.raises(CheckpointNotFoundError, match="holds no checkpoint"):
        opened(tmp_path)
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(CheckpointLoadError, match="holds a list, not a state dict"):
        opened(tmp_path / "list.pt").entries  # noqa: B018
    torch.save({"a": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointLoadError, match="not a zip archive"):
        opened(tmp_path / "old.pt").entries  # noqa: B018
    path = of_writer("dcp", state)(tmp_path)
    (path / "integrity-0.json").write_bytes(b"{}")
    with pytest.raises(CheckpointCorruptError, match=r"integrity-0\.json"):
        opened(path).entries  # noqa: B018


def of_rank(rank: int, offsets: tuple[int, int], shape: tuple[int, int], whole: tuple[int, int] = (4, 3)) -> RankIndex:
    """What a rank wrote of a tensor that is spread over ranks."""
    nbytes = 4 * shape[0] * shape[1]
    items = item_columns([[0, 0, nbytes, 0, "float32", list(shape)]], [rank], [f"__{rank}_0.distcp"], [nbytes])
    return RankIndex("crc32", items, [], [("w",)], [0], [(whole, offsets)], [], [])


def test_parts_of_several_ranks_make_up_a_tensor() -> None:
    entry = contents_of("x", [of_rank(0, (0, 0), (1, 3)), of_rank(1, (1, 0), (3, 3))]).tensors["w"]
    assert (entry.shape, entry.nbytes) == ((4, 3), 48)
    places = [(piece.file, piece.offsets, piece.shape, piece.checksum) for piece in entry.place]
    assert places == [("__0_0.distcp", (0, 0), (1, 3), 0), ("__1_0.distcp", (1, 0), (3, 3), 1)]


@pytest.mark.parametrize(
    ("second", "text"),
    [
        (of_rank(1, (2, 0), (2, 3)), "has a hole"),
        (of_rank(1, (0, 0), (4, 3)), "has a hole|overlap"),
        (of_rank(1, (1, 0), (3, 3), whole=(5, 3)), "on one rank"),
    ],
)
def test_parts_that_contradict_each_other(second: RankIndex, text: str) -> None:
    with pytest.raises(CheckpointCorruptError, match=text):
        contents_of("x", [of_rank(0, (0, 0), (1, 3)), second])


def test_one_file_per_rank_is_listed_below_the_ranks(tmp_path: Path) -> None:
    path = of_writer("torch_save", state)(tmp_path)
    for name in ("checkpoint_{}.pt", "integrity-{}.json"):
        content = (path / name.format(0)).read_bytes().replace(b"checkpoint_0.pt", b"checkpoint_1.pt")
        (path / name.format(1)).write_bytes(content)
    manifest = decode_manifest((path / "manifest.json").read_bytes(), "x")
    manifest["world_size"] = 2
    for entry in [*manifest["files"]]:
        if "0" in entry["name"]:
            name = entry["name"].replace("0", "1")
            crc = {"crc32": zlib.crc32((path / name).read_bytes())} if "crc32" in entry else {}
            manifest["files"].append({**entry, "name": name, **crc})
    (path / "manifest.json").write_bytes(encode_manifest(manifest))
    index = opened(path)
    assert index.entries["rank_00001.model.weight"].path == ("rank_00001", "model", "weight")
    assert ranges_of(index, "rank_00000.model.weight")[0].file == "checkpoint_0.pt"


def test_megatron_has_sharded_and_common_values(tmp_path: Path) -> None:
    path = stock_dcp(tmp_path)
    (path / "metadata.json").write_text("{}")
    torch.save({"args": {"lr": 0.1}, "iteration": 30}, path / "common.pt")
    index = opened(path)
    assert (index.format, index.step, index.world_size) == ("megatron", 30, 1)
    assert index.entries["model.weight"].kind == "tensor"
    assert index.entries["args.lr"].path == ("args", "lr")


def test_files_committed_by_manifest(tmp_path: Path) -> None:
    checkpointer = build_checkpointer("sync", overrides=["checkpoint.commit=manifest"])
    checkpointer.save(state(), tmp_path / "iter_0000001")
    index = opened(tmp_path / "iter_0000001")
    assert Path(index.folder).parent == tmp_path / "iter_0000001"
    check_sums(index)
