"""The changes of a tensor: read by ours and by a reader of the format alone, and refused when they are damaged."""

from __future__ import annotations

import sys

import pytest
import torch
import xxhash
from publishing.published_format import changed

from ckpt_component import CheckpointConfigError, CheckpointCorruptError
from ckpt_component.publishing.delta import ENCODINGS, EncodedTensor, TensorDelta, apply_delta, require_codec
from ckpt_component.state.dtypes import SAFETENSORS
from ckpt_component.state.tensors import tensor_bytes

BLOCK = 1 << 10


def encoded(encoding: str, new: bytes, old: bytes, block: int = BLOCK) -> EncodedTensor:
    delta = TensorDelta(encoding, len(new))
    for start in range(0, len(new), block):
        a, b = memoryview(new)[start : start + block], memoryview(old)[start : start + block]
        assert delta.add(a, b) == (a != b)
    return delta.finish()


def applied(encoding: str, tensor: EncodedTensor, old: bytes) -> bytes:
    assert tensor.data is not None
    region = bytearray(old)
    apply_delta(encoding, memoryview(tensor.data), memoryview(region), tensor.checksum, "'w' in the test")
    return bytes(region)


def check(encoding: str, new: bytes, old: bytes, block: int = BLOCK) -> None:
    tensor = encoded(encoding, new, old, block)
    assert tensor.checksum == xxhash.xxh3_128_hexdigest(new) and tensor.base == xxhash.xxh3_128_hexdigest(old)
    if new == old:
        assert tensor.data is None
    else:
        assert tensor.data is not None and changed(encoding, tensor.data, old) == new
        assert applied(encoding, tensor, old) == new


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("dtype", sorted(SAFETENSORS))
def test_a_tensor_of_any_dtype_becomes_what_it_is_in_the_next_version(dtype: str, encoding: str) -> None:
    generator = torch.Generator("cpu").manual_seed(3)
    bits = torch.randint(0, 256, (7, 24, 16), generator=generator, device="cpu", dtype=torch.uint8)
    old = bits.view(torch.bool) if dtype == "bool" else bits.view(getattr(torch, dtype))
    new = old.clone()
    new[3] = old[5]
    check(encoding, bytes(tensor_bytes(new)), bytes(tensor_bytes(old)))


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("nbytes", [0, 1, 2, 7, 8, 9, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3])
def test_any_size_and_any_share_of_changes(nbytes: int, encoding: str) -> None:
    old = bytes(range(256)) * (nbytes // 256 + 1)
    old = old[:nbytes]
    every = bytes(byte ^ 0xFF for byte in old)
    first, last, middle = bytearray(old), bytearray(old), bytearray(old)
    if nbytes:
        first[0] ^= 1
        last[-1] ^= 0x80
        middle[nbytes // 2] ^= 4
    for new in (old, every, bytes(first), bytes(last), bytes(middle)):
        check(encoding, new, old)


def test_what_is_equal_at_the_beginning_is_not_compressed_and_not_lost() -> None:
    old = bytes(5 << 20)
    new = old[:-1] + b"\1"
    check("xor", new, old, 1 << 20)
    assert len(encoded("xor", new, old, 1 << 20).data or b"") < 2000


def test_changes_of_some_elements_are_small() -> None:
    generator = torch.Generator("cpu").manual_seed(1)
    old = torch.randn(1 << 19, generator=generator, device="cpu", dtype=torch.float32).to(torch.bfloat16)
    bits = old.view(torch.int16).clone()
    bits[torch.rand(len(bits), generator=generator, device="cpu", dtype=torch.float32) < 0.02] += 1
    new, before = bytes(tensor_bytes(bits)), bytes(tensor_bytes(old))
    assert len(encoded("xor", new, before, 1 << 18).data or b"") <= 0.03 * len(new)


def test_overwriting_twice_changes_nothing_and_xor_twice_is_noticed() -> None:
    old, new = bytes(3000), bytes(1500) + b"x" + bytes(1499)
    tensor = encoded("overwrite", new, old)
    assert applied("overwrite", tensor, new) == new
    with pytest.raises(CheckpointCorruptError, match="does not have the bytes of the new version"):
        applied("xor", encoded("xor", new, old), new)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_damage_anywhere_is_noticed(encoding: str) -> None:
    old = bytes(4000)
    new = bytes(bytearray((byte + 1) % 251 if place % 9 == 0 else byte for place, byte in enumerate(old)))
    tensor = encoded(encoding, new, old)
    assert tensor.data is not None
    for place in range(len(tensor.data)):
        flipped = bytearray(tensor.data)
        flipped[place] ^= 0x10
        for damaged in (bytes(flipped), tensor.data[:place]):
            try:
                region = applied(encoding, tensor._replace(data=damaged), old)
            except CheckpointCorruptError as error:
                assert "'w' in the test" in str(error)
            else:
                assert region == new, "a bit of the frame that says nothing about its content"


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_changes_of_a_tensor_of_another_size_are_refused(encoding: str) -> None:
    tensor = encoded(encoding, b"\1" * 4000, bytes(4000))
    for nbytes in (0, 1, 2000, 3999, 4001):
        with pytest.raises(CheckpointCorruptError, match="'w'"):
            applied(encoding, tensor, bytes(nbytes))


def test_an_unknown_encoding_is_refused() -> None:
    with pytest.raises(CheckpointCorruptError, match="'add'"):
        apply_delta("add", memoryview(b""), memoryview(bytearray(1)), "", "'w'")
    with pytest.raises(ValueError, match="xor"):
        TensorDelta("xorr", 1)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    require_codec("checkpoint.publish.to")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(
        CheckpointConfigError, match=r"needs the package zstandard: pip install 'ckpt_component\[publish\]'"
    ):
        require_codec("checkpoint.publish.to")
