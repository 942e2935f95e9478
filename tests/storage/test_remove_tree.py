"""Deleting a folder while another process renames in it: nothing outside of the folder is deleted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ckpt_component.core.storage.files import FileStorage


@pytest.mark.parametrize("number", range(1, 13))
def test_a_link_that_comes_in_the_place_of_a_folder_is_not_followed(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the n-th call to the system, the folder to delete, or one in it, becomes a link to precious files."""
    for inner, where in ((True, tmp_path / "inner"), (False, tmp_path / "outer")):
        root, outside = where / "root", where / "outside"
        (root / "ck" / "a").mkdir(parents=True)
        (outside / "a").mkdir(parents=True)
        for path in (root / "ck" / "a" / "file", outside / "file", outside / "a" / "file"):
            path.touch()
        victim, calls = root / "ck" / "a" if inner else root / "ck", [0]

        def swapping(name: str, victim: Path = victim, outside: Path = outside, calls: list[int] = calls) -> Any:
            real = getattr(os, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                calls[0] += 1
                if calls[0] == number and victim.is_dir():
                    os.rename(victim, victim.with_name("away"))
                    victim.symlink_to(outside)
                return real(*args, **kwargs)

            return call

        with monkeypatch.context() as patched:
            for name in ("open", "scandir", "listdir", "unlink", "rmdir"):
                patched.setattr(os, name, swapping(name))
            try:
                FileStorage().remove_tree(str(root / "ck"))
            except OSError as error:
                assert str(where) in str(error.filename)  # the whole path, for the log
        assert (outside / "file").exists() and (outside / "a" / "file").exists()


def test_a_tree_goes_whole_and_links_in_it_are_deleted_alone(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    folder = tmp_path / "root" / "ck"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "file").touch()
    for link in (folder / "link", folder / "a" / "link"):
        link.symlink_to(tmp_path / "kept")
    (folder / "broken").symlink_to("nowhere")
    before = len(os.listdir("/proc/self/fd"))
    FileStorage().remove_tree(str(folder))
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    FileStorage().remove_tree(str(tmp_path / "link"))
    assert os.listdir(tmp_path / "root") == [] and (tmp_path / "kept" / "file").exists()
    assert not os.path.lexists(tmp_path / "link") and len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(FileNotFoundError, match=str(folder)):
        FileStorage().remove_tree(str(folder))
