"""Replicas that were equal and no longer are: every changed byte is found, and which rank changed it where that shows."""

from __future__ import annotations

import ctypes
import os
import struct
from array import array
from base64 import b64encode
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from ckpt_component import CheckpointConfigError, build_checkpointer
from ckpt_component.core.storage.checksum import find_checksum
from ckpt_component.saving.replica_comparison import share_out_hashes
from ckpt_component.state.compare import NEVER, SAME_AS_THEN, SINCE_CHANGED, differing, parted
from ckpt_component.state.digests import HASHES, FullDigests, Hash, installed_hashes, object_digest
from ckpt_component.state.flatten import FlatState

SCRIPT = Path(__file__).parent / "scripts" / "replicas.py"
#: More bytes than one of the pieces in which a digest is computed.
LARGE = 17 << 20


def message(values: dict[int, int], known: int) -> dict[str, Any]:
    """What a rank sends that has these digests, by group."""
    sums = array("Q", [values[group] for group in sorted(values)])
    flags = bytes([known] * len(values))
    runs = [[group, group, 1] for group in sorted(values)]
    return {"runs": runs, "sums": b64encode(sums.tobytes()).decode(), "known": b64encode(flags).decode()}


@pytest.mark.parametrize(
    ("parts", "unchanged", "expected"),
    [
        ([[0, 2], [1]], [], "rank 1 differs from ranks 0, 2, which agree"),
        ([[3], [0, 1, 4, 5], [2]], [], "ranks 2, 3 differ from ranks 0, 1, 4, 5, which agree"),
        ([[0], [1]], [], "rank 0 and rank 1 differ; which of them is right is unknown"),
        ([[0], [1]], [0, 1], "rank 0 and rank 1 differ; which of them is right is unknown"),
        ([[4], [7]], [7], "the value of rank 4 has changed since they agreed, that of rank 7 has not"),
        ([[0, 1], [2, 3]], [0, 1], "ranks 0, 1 and ranks 2, 3 differ; which of them is right is unknown"),
        ([[0, 1], [2], [3]], [], "ranks 0, 1, rank 2 and rank 3 differ; which of them is right is unknown"),
        (
            [[n] for n in range(5)],
            [],
            "rank 0, rank 1, rank 2 and others differ; which of them is right is unknown",
        ),
    ],
)
def test_a_rank_is_named_only_if_more_than_half_agree_or_it_alone_has_changed(
    parts: list[list[int]], unchanged: list[int], expected: str
) -> None:
    assert parted(parts, unchanged) == expected


def test_only_values_of_which_two_ranks_have_different_digests_differ() -> None:
    # Ranks 0 and 3 share no value, rank 4 has nothing; the largest digests do not fit a signed number.
    ranks = [{0: 5, 1: 2**64 - 1}, {1: 2**64 - 2, 2: 7, 3: 9}, {0: 5, 2: 7}, {3: 8}]
    messages = [*(message(values, SINCE_CHANGED) for values in ranks), {}, message({}, NEVER)]
    found = [(each.group, each.rank) for each in differing(messages)]
    assert found == [(1, 0), (3, 1)]
    assert differing([message(ranks[0], NEVER), message(ranks[0], SAME_AS_THEN)]) == []
    assert differing([]) == []


def test_values_were_equal_before_only_if_all_their_ranks_say_so() -> None:
    old, new = message({0: 1}, SAME_AS_THEN), message({0: 2}, NEVER)
    assert [each.ranks for each in differing([old, new])] == [""]
    (found,) = differing([message({0: 1}, SAME_AS_THEN), message({0: 2}, SINCE_CHANGED)])
    assert found.ranks.startswith("the value of rank 1 has changed")


def test_of_very_many_differences_each_is_reported_and_the_first_are_described() -> None:
    count = 2000
    messages = [message(dict.fromkeys(range(count), rank), SINCE_CHANGED) for rank in range(3)]
    found = differing(messages)
    assert [each.group for each in found] == list(range(count))
    assert "rank 2" in found[9].ranks and found[10].ranks == "differs"


def bits_of(tensor: torch.Tensor) -> Any:
    """The bytes of a tensor, to change them without torch."""
    return (ctypes.c_ubyte * tensor.untyped_storage().nbytes()).from_address(tensor.untyped_storage().data_ptr())


def one_bit(data: Any) -> None:
    data[len(data) * 2 // 3] ^= 16


def many_bits(data: Any) -> None:
    for place in range(len(data) // 2, len(data) // 2 + min(len(data) // 2, 500)):
        data[place] ^= 0xFF


def a_stride(data: Any) -> None:
    for place in range(7, len(data), 4099):
        data[place] ^= 1


def a_nan(data: Any) -> None:
    data[len(data) // 8 * 4 : len(data) // 8 * 4 + 4] = struct.pack("f", float("nan"))


PATTERNS = (one_bit, many_bits, a_stride, a_nan)


def full_digests(tensors: Sequence[torch.Tensor], hash_of: Hash) -> list[int]:
    flat = FlatState(tensors=[*tensors])
    return FullDigests(flat, range(len(tensors)), hash_of).of(flat).tolist()


@pytest.mark.parametrize("name", HASHES)
@pytest.mark.parametrize("damage", PATTERNS)
def test_a_digest_has_every_byte(name: str, damage: Callable[[Any], None]) -> None:
    assert name in installed_hashes()
    random = torch.Generator().manual_seed(int(os.environ.get("CKPT_STRIDE_OFFSET", "0")))
    tensors = [
        torch.randn(3, generator=random),
        torch.randn(300, 700, generator=random),  # more than what one thread hashes by itself
        torch.randint(0, 255, (2, LARGE + 3), dtype=torch.uint8, generator=random),
        torch.randn(500, 40, generator=random).t(),
        torch.randn(20, dtype=torch.complex64, generator=random).conj(),
        torch.randn(20, generator=random).bfloat16(),
        torch.empty(0, 3),
    ]
    hash_of = find_checksum(name).of
    before = full_digests(tensors, hash_of)
    assert len(set(before)) == len(tensors)
    for number, tensor in enumerate(tensors[:-1]):
        changed = torch.empty_like(tensor).conj() if tensor.is_conj() else torch.empty_like(tensor)
        changed.copy_(tensor)
        version = changed._version
        assert full_digests([changed], hash_of)[0] == before[number]
        damage(bits_of(changed))
        assert full_digests([changed], hash_of)[0] != before[number]
        assert changed._version == version


@pytest.mark.slow
def test_a_digest_does_not_depend_on_strides_and_threads() -> None:
    large = torch.randint(0, 255, (4, LARGE), dtype=torch.uint8)  # more than is copied at a time
    tensors = [torch.arange(6.0).view(2, 3), large, torch.randn(6, 5, 8, 7)]
    hash_of, threads = find_checksum(installed_hashes()[0]).of, torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = full_digests(tensors, hash_of)
    finally:
        torch.set_num_threads(threads)
    for dims in (0, 1), (1, 0):
        strided = [each.transpose(*dims).contiguous().transpose(*dims) for each in tensors]
        strided[2] = tensors[2].to(memory_format=torch.channels_last)
        assert full_digests(strided, hash_of) == expected
    assert full_digests([each.conj() for each in tensors], hash_of) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_digest_of_a_cuda_tensor_is_that_of_its_copy() -> None:
    tensors = [torch.randn(9, LARGE // 24), *(torch.full((3,), number) for number in range(500))]
    tensors += [torch.randn(70, 50).t(), torch.randn(5, dtype=torch.complex64).conj(), torch.empty(0)]
    hash_of = find_checksum(installed_hashes()[0]).of
    on_device = [each.cuda() for each in tensors]
    expected = full_digests(tensors, hash_of)
    assert full_digests(on_device, hash_of) == expected
    on_device[0].view(-1)[LARGE // 7] += 1
    assert [a != b for a, b in zip(full_digests(on_device, hash_of), expected, strict=True)].index(True) == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda last: [*range(100_000), last],
        lambda last: {f"k{number}": 0.5 for number in range(50_000)} | {"last": last},
        lambda last: ("x" * 100_000 + str(last) + "y" * 100_000, None),
        lambda last: {number: [{1, 2, number}, (last,)] for number in range(5000)},
        lambda last: ([torch.arange(100_000), torch.tensor([last] * 100_000)],),
        lambda last: {"deep": {"deeper": [[[{"a": last}]]]}},
    ],
    ids=["list", "dict", "text", "mixed", "tensor", "deep"],
)
def test_a_whole_digest_of_an_object_has_all_its_elements(make: Callable[[int], Any]) -> None:
    assert object_digest(make(1), None) == object_digest(make(1), None) != object_digest(make(2), None)


def test_a_whole_digest_does_not_depend_on_the_order_of_dicts_and_sets() -> None:
    names = [f"n{number}" for number in range(100)]
    for keys in names, list(reversed(names)):
        value = ({key: 1 for key in keys}, {key: {"x": [key]} for key in keys}, set(keys))
        assert object_digest(value, None) == object_digest(({key: 1 for key in names}, *value[1:]), None)
    assert object_digest([1, True], None) != object_digest([True, 1], None)


def test_the_ranks_use_a_hash_that_all_of_them_can_compute() -> None:
    rank: dict[str, list[Any]] = {"tensors": ["w"], "bytes": [4], "objects": []}
    for common in ["crc32"], ["xxh3_64", "crc32"], list[str]():
        shares = share_out_hashes([{**rank, "hashes": [*HASHES]}, {**rank, "hashes": common}])
        assert [share["hashes"] for share in shares] == [common, common]


@pytest.mark.parametrize(
    ("overrides", "advice"),
    [
        (["checkpoint.check_replicas=off"], "checkpoint.check_replicas=sample or all"),
        (["checkpoint/writer=torch_save"], "checkpoint/writer=dcp"),
    ],
)
def test_an_error_that_could_never_be_raised_is_refused(overrides: list[str], advice: str) -> None:
    with pytest.raises(CheckpointConfigError, match=advice):
        build_checkpointer("async_persistent", [*overrides, "checkpoint.on_different_replicas=error"])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_damaged_replica_is_found_at_the_next_save_with_its_key_and_rank(world_size: int, tmp_path: Path) -> None:
    run_ranks(SCRIPT, "damaged", world_size, tmp_path)


@pytest.mark.slow
def test_different_replicas_fail_the_save_alike_on_all_ranks(tmp_path: Path) -> None:
    outputs = run_ranks(SCRIPT, "refused", 2, tmp_path)
    errors = [[line for line in each.splitlines() if line.startswith("refused: ")] for each in outputs]
    assert errors[0] == errors[1] and len(errors[0]) == 2, outputs
    assert "'model.w' (the value of rank 1 has changed since they agreed, that of rank 0 has not)" in errors[0][0]
    assert "1 value differs by rank, and only one rank's value is saved: 'seed'." in errors[0][1]


@pytest.mark.slow
def test_states_of_ddp_fsdp_and_tensor_parallel_models_raise_no_alarm(tmp_path: Path) -> None:
    run_ranks(SCRIPT, "trained", 2, tmp_path, SAVES="20")


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_thousand_saves_of_parallel_models_raise_no_alarm(tmp_path: Path) -> None:
    run_ranks(SCRIPT, "trained", 2, tmp_path, 3500, SAVES="1000")
