"""What several ranks have is stored once, and each rank stores about the same number of bytes."""

from __future__ import annotations

from ckpt_component.state.replicas import share_out


def test_shared_tensors_are_spread_by_bytes_the_largest_first() -> None:
    sizes = {"a": 10, "b": 70, "c": 30, "d": 40, "own": 60}
    everywhere = {"tensors": [*"abcd"], "bytes": [sizes[name] for name in "abcd"], "objects": ["o"]}
    first = {**everywhere, "tensors": ["own", *"abcd"], "bytes": [sizes["own"], *everywhere["bytes"]]}
    ranks = [first, everywhere, everywhere]
    shares = share_out(ranks)
    stored = [
        [rank["tensors"][number] for number in share["tensors"]] for rank, share in zip(ranks, shares, strict=True)
    ]
    assert sorted(name for names in stored for name in names) == ["a", "b", "c", "d", "own"]
    assert [sum(sizes[name] for name in names) for names in stored] == [70, 70, 70]
    assert [share["objects"] for share in shares] == [[0], [], []]
