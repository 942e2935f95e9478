"""Items, trees, objects and structures: bytes as torch writes them, keys as DCP names them, changes always noticed."""

from __future__ import annotations

import io
import os
import random
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from ckpt_component.core.image.arena import Arena
from ckpt_component.core.image.arena_pool import ArenaPool
from ckpt_component.errors import CheckpointStageError
from ckpt_component.formats.dcp import DcpWriter
from ckpt_component.formats.zip_records import around_payload, tensor_pickle
from ckpt_component.state.flatten import FlatState, flatten, unflatten
from ckpt_component.state.objects import PACKED_DTYPES, decode, dump, encode
from ckpt_component.state.paths import key_of
from ckpt_component.state.structure import Structure

DTYPES = [torch.float32, torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.uint16]
SHAPES = [(), (0,), (3,), (0, 5), (7, 1, 3), (1000,), (1024, 300)]


@pytest.mark.parametrize("dtype", DTYPES, ids=repr)
@pytest.mark.parametrize("shape", SHAPES, ids=repr)
def test_prefix_payload_and_suffix_are_an_archive_with_the_pickle_of_torch_save(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    raw = torch.randint(0, 2, (torch.Size(shape).numel() * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype).view(shape) if raw.numel() else torch.empty(shape, dtype=dtype)
    prefix, suffix = around_payload(dtype, tensor.shape)
    assert len(prefix) % 64 == 0 and len(prefix) + len(suffix) < 1000
    archive = prefix + bytes(raw.numpy()) + suffix
    loaded = torch.load(io.BytesIO(archive), weights_only=True)
    assert (loaded.dtype, loaded.shape) == (tensor.dtype, tensor.shape)
    assert bytes(loaded.reshape(-1).view(torch.uint8).numpy()) == bytes(raw.numpy())
    stock = io.BytesIO()
    torch.save(tensor, stock)
    assert records_of(io.BytesIO(archive)).items() <= records_of(stock).items()
    assert records_of(io.BytesIO(archive)).keys() == {"data.pkl", "byteorder", "version", "data/0"}


def records_of(stream: io.BytesIO) -> dict[str, bytes]:
    """What torch's own reader finds in an archive."""
    stream.seek(0)
    reader = torch._C.PyTorchFileReader(stream)
    return {name: reader.get_record(name) for name in reader.get_all_records()}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.filterwarnings("ignore:.*support is experimental")  # of torch, at the first tensor of a new dtype
def test_every_dtype_and_shape_has_the_pickle_of_torch_save() -> None:
    rng = random.Random(1)
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)} - PACKED_DTYPES
    quantized = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
    for dtype in sorted(dtypes - quantized, key=str):
        counts = [0, 1, 5, 255, 256, rng.randint(257, 65_534), 65_535, 65_536, 65_537 + rng.randint(1, 100_000)]
        shapes = [(), *((count,) for count in counts), (0, 5), (2, 0, 3, 0), (300, 300), (1,) * 7]
        shapes += [tuple(rng.randint(1, 4) for _ in range(rng.randint(2, 6))) for _ in range(5)]
        for shape in shapes:
            stock = io.BytesIO()
            torch.save(torch.empty(shape, dtype=dtype), stock)
            assert tensor_pickle(dtype, torch.Size(shape)) == records_of(stock)["data.pkl"], (dtype, shape)


@pytest.mark.parametrize("nbytes", [(1 << 31) - 1, 1 << 31, (1 << 32) - 2, (1 << 32) - 1, 5 << 30])
def test_archives_around_gigabytes_have_their_sizes(nbytes: int, tmp_path: Path) -> None:
    dtype, shape = torch.uint8, torch.Size((nbytes,))
    prefix, suffix = around_payload(dtype, shape)
    path = tmp_path / "sparse.pt"
    with open(path, "wb") as file:
        file.write(prefix)
        file.seek(nbytes - 3, os.SEEK_CUR)
        file.write(b"end" + suffix)
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert loaded.shape == shape and bytes(loaded[-4:].numpy()) == b"\0end"
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("archive/data/0").file_size == nbytes


def assert_same(left: Any, right: Any) -> None:
    """Equal in types, keys and values; the order of a dict's keys is not kept."""
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert set(left) == set(right) and {type(key) for key in left} == {type(key) for key in right}
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    else:
        assert left == right


def random_tree(rng: random.Random, depth: int) -> Any:
    kind = rng.choice(["dict", "list", "tensor", "value", "tuple"]) if depth else rng.choice(["tensor", "value"])
    if kind == "dict":
        return {rng.choice(["a", "b", "c.d", 1, 2]): random_tree(rng, depth - 1) for _ in range(rng.randint(0, 3))}
    if kind == "list":
        return [random_tree(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    if kind == "tuple":
        return (1, "x", rng.random())
    return torch.tensor(rng.random()) if kind == "tensor" else rng.choice([1, "text", None, 2.5, b"raw", {"n"}])


def test_keys_are_those_of_stock_dcp_and_the_tree_comes_back() -> None:
    compared = 0
    for seed in range(60):
        rng = random.Random(seed)
        state = {"root": random_tree(rng, 4), "more": random_tree(rng, 3)}
        try:
            expected, _ = flatten_state_dict(state)
        except ValueError:
            continue  # the random tree has two equal flat keys, which stock refuses too
        flat = flatten(state)
        values = dict(zip([*flat.tensor_paths, *flat.object_paths], [*flat.tensors, *flat.objects], strict=True))
        found = {key_of(path): id(value) for path, value in values.items()}
        assert found == {key: id(value) for key, value in expected.items()}, f"seed {seed}"
        assert_same(unflatten(values, flat.containers), state)
        compared += 1
    assert compared > 40


def test_what_stock_forgets_comes_back() -> None:
    state: dict[str, Any] = {"i": {0: 1, "0x": 2}, "e": {}, "o": OrderedDict(a=1), "l": [{"x": 1}, [torch.ones(1)]]}
    flat = flatten(state)
    paths = zip([*flat.tensor_paths, *flat.object_paths], [*flat.tensors, *flat.objects], strict=True)
    back = unflatten(dict(paths), flat.containers)
    assert_same(back, state)
    assert type(back["o"]) is OrderedDict


def test_objects_of_every_kind_come_back_by_safe_loading() -> None:
    numpy = pytest.importorskip("numpy")
    generator = numpy.random.default_rng(3).bit_generator.state
    value = {
        "numbers": (1, -(2**70), 2.5, 1 + 2j, True, None),
        "text": ["a", b"b", {1, 2}, OrderedDict(x=1)],
        "torch": (torch.float32, torch.device("cpu"), torch.Size([1, 2])),
        "random": random.getstate(),
        "generator": generator,
    }
    assert load(dump(encode(value, "key"))) == value
    legacy = numpy.random.get_state()
    back = load(dump(encode(legacy, "key")))
    assert back[0] == legacy[0] and numpy.array_equal(back[1], legacy[1]) and back[1].dtype == legacy[1].dtype
    scalar = decode(encode(numpy.float64(1.5), "key"))
    assert type(scalar) is numpy.float64 and scalar == 1.5
    torch.testing.assert_close(load(dump(encode((torch.ones(2), 1), "key")))[0], torch.ones(2))


def load(data: bytes) -> Any:
    return decode(torch.load(io.BytesIO(data), weights_only=True))


def test_an_object_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(CheckpointStageError, match="'key' contains itself"):
        encode(loop, "key")


def structure_of(state: dict[str, Any]) -> tuple[Structure, FlatState]:
    flat = flatten(state)
    return Structure(flat), flat


def together(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let so many tensors be looked at before the next ones."""
    monkeypatch.setattr("ckpt_component.state.structure.BATCH", count)


def test_a_changed_structure_is_always_noticed() -> None:
    weight = torch.randn(4, 6)
    state: dict[str, Any] = {"w": weight, "tied": weight, "b": torch.zeros(3), "n": 1}
    structure, _ = structure_of(state)
    assert len(structure.stored) == 2
    assert structure.matches(flatten({**state, "n": 2}))
    again = torch.randn(4, 6)
    assert structure.matches(flatten({"w": again, "tied": again, "b": torch.ones(3), "n": 1}))
    for changed in (
        {**state, "w": weight.clone()},  # untied
        {**state, "b": weight.flatten()[:3]},  # newly shares an address
        {**state, "b": torch.zeros(3, dtype=torch.float64)},
        {**state, "b": torch.zeros(4)},
        {**state, "w": weight.t().contiguous().t(), "tied": weight},
        {**state, "new": 1},
        {"tied": weight, "w": weight, "b": torch.zeros(3), "n": 1},
        {**state, "n": torch.tensor(1)},
    ):
        assert not structure.matches(flatten(changed))


@pytest.mark.filterwarnings("ignore")  # torch says of CSR, nested and quantized tensors that they are new or old
def test_a_change_of_one_among_many_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    together(monkeypatch, 4)
    state = {f"w{number}": torch.randn(3, 2) for number in range(11)}
    state["c"] = torch.randn(4, dtype=torch.complex64)
    state["t"] = torch.randn(4, 2).t()
    structure, _ = structure_of(state)
    flat = flatten({key: value.clone() for key, value in state.items()})
    assert structure.matches(flat)
    assert list(flat.pointers) == [tensor.data_ptr() for tensor in flat.tensors]
    changes = [
        torch.randn(2, 3),
        torch.randn(2, 3).t(),
        torch.nn.Parameter(state["w7"]),
        torch._neg_view(state["w7"]),
        state["w7"].to_sparse(),
        state["w7"].to_sparse_csr(),
        torch.nested.nested_tensor([state["w7"]]),
        torch.quantize_per_tensor(state["w7"], 0.1, 0, torch.quint8),
        state["w7"].to("meta"),
        state["w6"],
        torch.randint(9, (3, 2), dtype=torch.int32),
    ]
    for changed in changes:
        assert not structure.matches(flatten({**state, "w7": changed})), changed
    assert not structure.matches(flatten({**state, "c": state["c"].conj()}))
    assert not structure.matches(flatten({**state, "t": torch.randn(2, 4)}))
    assert structure.matches(flatten(state))


def test_ties_gaps_and_views_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    together(monkeypatch, 3)
    base = torch.randn(6, dtype=torch.complex64)
    empty = torch.empty(0)
    state = {
        "a": base,
        "tied": base.view(6),
        "conjugated": base.conj(),
        "shaped": base.view(2, 3),
        "gaps": base[::2],
        "negated": base.conj().imag,
        "e": empty,
        "f": empty,
    }
    structure, _ = structure_of(state)
    assert list(structure.stored_of) == [0, 0, 1, 2, 3, 4, 5, 6]
    assert structure.ties == [(1, 0, 0)]
    assert [structure.is_dense(number) for number in range(8)] == [True, True, False, True, False, False, False, False]
    assert [structure.stride_of(number) for number in range(6)] == [(1,), (1,), (1,), (3, 1), (2,), (2,)]


class Walked(dict[Any, Any]):
    """Is walked value by value, whatever its width."""


@pytest.mark.parametrize("container", [dict, OrderedDict], ids=repr)
def test_wide_dicts_are_walked_as_others_are(container: Any) -> None:
    plain = [(f"w{number}", torch.full((1,), number)) for number in range(40)]
    special = [("p", torch.nn.Parameter(torch.ones(1))), ("b", torch.nn.Buffer(torch.ones(1)))]
    for items in (plain, [*plain, ("text", "x")], [*plain, (7, torch.ones(1))], [*plain, *special]):
        for state, walked in (
            ({"model": container(items), "n": 1}, {"model": Walked(items), "n": 1}),
            (container(items), Walked(items)),
        ):
            found, expected = flatten(state), flatten(walked)
            assert found.tensor_paths == expected.tensor_paths and found.object_paths == expected.object_paths
            assert list(map(id, found.tensors)) == list(map(id, expected.tensors))
            place = ("model",) if "model" in state else ()
            assert all(kind.startswith("class ") for _, kind in expected.containers)
            assert found.shards == expected.shards
            assert found.containers == ([(place, "odict")] if container is OrderedDict else [])


def test_slots_are_views_of_the_arena_at_their_addresses() -> None:
    state = {
        "a": torch.randn(5),
        "b": torch.randn(2, 3).to(torch.bfloat16),
        "c": torch.tensor(1),
        "e": torch.empty(0, 2),
    }
    structure, _ = structure_of(state)
    layout = DcpWriter().plan(structure, 0).layout
    arena = Arena(layout.arena_bytes, shared=False)
    slots = arena.slots(layout)
    assert slots is arena.slots(layout) and len(slots) == 4 and slots[1] is slots[1]
    for number, (item, slot) in enumerate(zip(layout.items, slots, strict=True)):
        entry = layout.stored[item.stored]
        assert (slot.dtype, slot.shape, slot.is_contiguous()) == (entry.dtype, entry.shape, True)
        assert slots.sizes[number] == slot.nbytes
        if slot.nbytes:
            assert slot.data_ptr() == slots.addresses[number] == arena.slab.data_ptr() + layout.payload_at(item)
    arena.close()


@pytest.mark.parametrize("advice", [None, 9999], ids=["populated", "on an old kernel"])
def test_a_shared_arena_has_all_its_pages_from_the_beginning(
    advice: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is only sized would kill whoever writes to it when memory runs out."""
    if advice is not None:
        monkeypatch.setattr("ckpt_component.core.pages.MADV_POPULATE_WRITE", advice)
    arena = Arena(5 << 20, shared=True)
    try:
        assert arena.fd is not None and os.fstat(arena.fd).st_blocks * 512 >= arena.nbytes == 5 << 20
    finally:
        arena.close()


def test_an_arena_is_leased_to_one_save_at_a_time() -> None:
    pool = ArenaPool(1, shared=True)
    arena = pool.lease(100, 1)
    assert not pool.wait_free(0)
    from ckpt_component.errors import CheckpointTimeoutError

    with pytest.raises(CheckpointTimeoutError, match=r"timeouts\.stage"):
        pool.lease(100, 0.05)
    pool.give_back(arena)
    assert pool.lease(100, 1) is arena
    pool.give_back(arena)
    larger = pool.lease(arena.nbytes + 1, 1)
    assert larger is not arena and arena.closed
    pool.close()
    pool.give_back(larger)
    assert larger.closed


def test_memory_that_is_not_to_be_had_is_a_typed_error() -> None:
    from ckpt_component.errors import CheckpointError

    with pytest.raises(CheckpointError, match="GB of host memory cannot be reserved .* GB are available"):
        Arena(1 << 50, shared=True)
