from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ckpt_train.data import WindowSampler, load_text

from ckpt_component.config.hydra.hydra_errors import CheckpointConfigError


def load(path: Path | None, *, max_bytes: int = 100_000, validation: float = 0.0, context: int = 4) -> bytes:
    text = load_text(None if path is None else str(path), max_bytes, validation, context)
    return bytes(text.train.tolist())


def test_the_default_is_pythons_own_library_and_always_the_same() -> None:
    first, second = load_text(None, 50_000, 0.1, 16), load_text(None, 50_000, 0.1, 16)
    assert len(first.train) == 45_000 and len(first.validation) == 5_000
    assert first.fingerprint == second.fingerprint
    assert b"import" in bytes(first.train.tolist())


def test_a_file_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"k\xc3\xa4se, br\xffot")
    assert load(tmp_path / "a.txt") == b"k\xc3\xa4se, br\xffot"


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name, content in {
        "b": b"two,",
        "a": b"one,",
        "sub/c": b"three",
        ".x": b"no",
        ".hidden/y": b"no",
    }.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "picture").write_bytes(b"\x89PNG\0\0")
    assert load(tmp_path) == b"one,two,three"


def test_no_more_than_max_bytes_is_used(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    (tmp_path / "b").write_bytes(b"abcdefghij")
    assert load(tmp_path, max_bytes=13) == b"0123456789abc"


def test_the_end_is_kept_for_validation(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(65, 85)))
    text = load_text(str(tmp_path), 100, 0.3, 4)
    assert bytes(text.train.tolist()) == bytes(range(65, 79))
    assert bytes(text.validation.tolist()) == bytes(range(79, 85))


def test_a_validation_share_too_small_for_a_window_is_made_one(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(65, 85)))
    assert len(load_text(str(tmp_path), 100, 0.05, 4).validation) == 5


def test_the_fingerprint_tells_texts_of_one_size_apart(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    (tmp_path / "b").write_bytes(b"0123456780")
    first, second = (load_text(str(tmp_path / name), 100, 0.0, 4) for name in "ab")
    assert first.fingerprint != second.fingerprint


def refusal(path: Path, **arguments: int) -> str:
    with pytest.raises(CheckpointConfigError) as caught:
        load(path, **arguments)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_path_with_nothing_at_it_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "nowhere"
    assert refusal(path) == (
        f"data.path={path} does not exist; give a file or a folder of text, "
        "or leave data.path out for Python's standard library."
    )


def test_a_path_without_text_is_refused(tmp_path: Path) -> None:
    assert "has 0 bytes of text" in refusal(tmp_path)
    (tmp_path / "binary").write_bytes(b"\0\0")
    assert "has 0 bytes of text" in refusal(tmp_path)


def test_too_short_a_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"short")
    assert refusal(tmp_path, context=64) == (
        f"data.path={tmp_path} has 5 bytes of text (data.max_bytes=100000), too few to train "
        "and validate with model.context=64; give more text."
    )


def test_every_window_comes_once_an_epoch_in_another_order() -> None:
    sampler = WindowSampler(10, seed=1, fingerprint=0)
    first = torch.cat([sampler.take(3), sampler.take(3), sampler.take(4)]).tolist()
    second = sampler.take(10).tolist()
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_taking_does_not_change_a_state_that_was_given_out() -> None:
    sampler = WindowSampler(10, seed=1, fingerprint=7)
    state = sampler.state_dict()
    before = state["order"].clone()
    sampler.take(15)
    assert torch.equal(state["order"], before)
