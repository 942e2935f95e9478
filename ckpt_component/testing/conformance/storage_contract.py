"""What every storage must do, as tests: derive from `StorageContract`, and pytest runs them with your storage.

    class TestMine(StorageContract):
        def storage(self, tmp_path):
            return MyStorage(), str(tmp_path)

The methods need pytest only to be found. They say what `ckpt_component.core.storage.storage` promises on its page.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...core.storage.files import local_files
from ...core.storage.storage import Storage


class StorageContract:
    """Tests of a storage."""

    def storage(self, tmp_path: Any) -> tuple[Storage, str]:
        """The storage, and a folder in it that is empty and that nobody else uses; called once for each test.

        Args:
            tmp_path: pytest's folder for the test
        """
        raise NotImplementedError

    def test_what_is_written_is_read(self, tmp_path: Any) -> None:
        storage, root = self.storage(tmp_path)
        path = os.path.join(root, "file")
        storage.write_new(path, b"abc")
        assert storage.read(path, 3) == b"abc"
        assert storage.size(path) == 3
        assert storage.exists(path)
        assert not storage.is_folder(path)
        assert storage.names(root) == ["file"]

    def test_a_large_file_is_written_in_ranges(self, tmp_path: Any) -> None:
        storage, root = self.storage(tmp_path)
        storage.make_folders(os.path.join(root, "step"))
        fd = storage.create(os.path.join(root, "step", "data"), 8)
        storage.write(fd, [memoryview(b"01"), memoryview(b"23")], 0)
        storage.write(fd, [memoryview(b"4567")], 4)
        storage.sync(fd)
        storage.close(fd)
        with storage.open_files(os.path.join(root, "step")) as files:
            buffer = memoryview(bytearray(4))
            assert files.size("data") == 8
            assert files.fill("data", buffer, 2)
            assert bytes(buffer) == b"2345"
            assert not files.fill("data", buffer, 6)  # it is too short
            with files.stream("data") as stream:
                assert stream.read() == b"01234567"

    def test_creation_is_exclusive(self, tmp_path: Any) -> None:
        storage, root = self.storage(tmp_path)
        path = os.path.join(root, "file")
        storage.write_new(path, b"first")
        self._refused(lambda: storage.write_new(path, b"second"))
        assert storage.read(path, 10) == b"first"

    def test_a_put_has_one_winner(self, tmp_path: Any) -> None:
        storage, root = self.storage(tmp_path)
        path, drafts = os.path.join(root, "taken"), [os.path.join(root, f"draft{number}") for number in range(6)]
        for draft in drafts:
            storage.write_new(draft, draft.encode())

        def put(draft: str) -> bool:
            try:
                storage.put_new(path, draft.encode(), draft)
            except FileExistsError:
                return False
            return True

        with ThreadPoolExecutor(len(drafts)) as pool:
            won = list(pool.map(put, drafts))
        assert won.count(True) == 1
        assert storage.read(path, 1000) == drafts[won.index(True)].encode()

    def test_a_small_file_is_replaced_as_a_whole(self, tmp_path: Any) -> None:
        storage, root = self.storage(tmp_path)
        path = os.path.join(root, "pointer")
        for text in (b"1", b"22", b"333"):
            storage.write_over(path, text)
            assert storage.read(path, 10) == text
        assert storage.names(root) == ["pointer"]

    def test_bytes_are_appended(self, tmp_path: Any) -> None:
        storage, root = self.storage(tmp_path)
        path = os.path.join(root, "events")
        for text in (b"one\n", b"two\n"):
            storage.append(path, text)
        assert storage.read(path, 100) == b"one\ntwo\n"

    def test_reads_have_a_limit(self, tmp_path: Any) -> None:
        storage, root = self.storage(tmp_path)
        path = os.path.join(root, "file")
        storage.write_new(path, b"12345")
        try:
            storage.read(path, 4)
        except FileNotFoundError:
            raise
        except OSError:
            return
        raise AssertionError("a file above the limit was read")

    def test_what_is_missing(self, tmp_path: Any) -> None:
        storage, root = self.storage(tmp_path)
        path = os.path.join(root, "missing")
        assert storage.size(path) is None
        assert not storage.exists(path)
        assert not storage.is_real_folder(path)
        assert storage.names(path) == []
        for call in (lambda: storage.read(path, 1), lambda: storage.unlink(path), lambda: storage.modified(path)):
            try:
                call()
            except FileNotFoundError:
                continue
            raise AssertionError("no FileNotFoundError")

    def test_a_held_file_is_shared(self, tmp_path: Any) -> None:
        storage, root = self.storage(tmp_path)
        storage.make_folders(root)
        one, other = os.path.join(root, "one"), os.path.join(root, "other")
        fd = storage.create(one, 5)
        storage.write(fd, [memoryview(b"bytes")], 0)
        storage.sync(fd)
        storage.close(fd)
        held = storage.hold(one)
        if held is None:
            return
        storage.share(held, other)
        storage.unlink(one)
        block = memoryview(bytearray(3))
        again = storage.hold(other)
        assert again is not None
        storage.read_held(again, block, 1)
        assert storage.read(other, 10) == b"bytes" and bytes(block) == b"yte"
        storage.release(held)
        storage.release(again)
        assert storage.read(other, 10) == b"bytes"
        try:
            storage.hold(one)
        except FileNotFoundError:
            return
        raise AssertionError("no FileNotFoundError")

    def test_folders(self, tmp_path: Any) -> None:
        storage, root = self.storage(tmp_path)
        deep = os.path.join(root, "a", "b")
        storage.make_folders(deep)
        storage.write_new(os.path.join(deep, "file"), b"x")
        storage.sync_folder(deep)
        assert storage.is_real_folder(deep)
        assert storage.names(os.path.join(root, "a")) == ["b"]
        try:
            storage.remove_folder(deep)
        except OSError:
            pass
        else:
            raise AssertionError("a folder that is not empty was removed")
        storage.remove_tree(os.path.join(root, "a"))
        assert storage.names(root) == []

    def test_files_below_a_folder_and_which_of_them_are_one(self, tmp_path: Any) -> None:
        storage, root = self.storage(tmp_path)
        one, deep, other = (os.path.join(root, *names) for names in (["one"], ["a", "b", "deep"], ["other"]))
        storage.make_folders(os.path.dirname(deep))
        storage.make_folders(os.path.join(root, "empty"))
        storage.write_new(one, b"abc")
        storage.write_new(deep, b"de")
        assert sorted((file.path, file.size) for file in storage.files_below(root)) == [(deep, 2), (one, 3)]
        assert [file.path for file in storage.files_below(one)] == [one]
        assert [*storage.files_below(os.path.join(root, "empty"))] == [*storage.files_below(other)] == []
        alone = storage.file_at(one)
        held = storage.hold(one)
        # A store copies an object; of a file system, both paths lead to one file.
        is_one = held is not None and storage.share(held, other) and local_files(storage) is not None
        if held is None:
            storage.write_new(other, b"abc")
        else:
            storage.release(held)
        files = {file.path: file for file in storage.files_below(root)}
        assert alone is not None
        assert files[one].paths == alone.paths + is_one
        assert (files[one].identity == files[other].identity) == is_one
        assert files[deep].identity != files[one].identity

    def test_its_clock(self, tmp_path: Any) -> None:
        storage, root = self.storage(tmp_path)
        path = os.path.join(root, "file")
        began = storage.try_folder(root, "trial")
        storage.write_new(path, b"x")
        written = storage.modified(path)
        storage.touch(path)
        assert began <= written <= storage.modified(path) <= storage.try_folder(root, "trial") + 1
        assert storage.names(root) == ["file"]

    def test_a_folder_gets_a_name_that_is_free(self, tmp_path: Any) -> None:
        storage, root = self.storage(tmp_path)
        files = local_files(storage)
        if files is None or not files.atomic_rename:
            return  # nothing is renamed there
        for name in ("staging", "other", "taken"):
            storage.make_folders(os.path.join(root, name))
        storage.write_new(os.path.join(root, "staging", "data"), b"x")
        self._refused(lambda: files.rename_new(os.path.join(root, "staging"), os.path.join(root, "taken")))
        files.rename_new(os.path.join(root, "staging"), os.path.join(root, "free"))
        files.exchange(os.path.join(root, "free"), os.path.join(root, "other"))
        assert storage.names(root) == ["free", "other", "taken"]
        assert storage.names(os.path.join(root, "other")) == ["data"]

    def test_locks(self, tmp_path: Any) -> None:
        storage, root = self.storage(tmp_path)
        files = local_files(storage)
        if files is None:
            return  # there are none; files that are touched take their place
        from fcntl import LOCK_EX, LOCK_NB, LOCK_SH

        one, two = files.open_folder(root), files.open_folder(root)
        try:
            files.flock(one, LOCK_SH | LOCK_NB)
        except OSError:
            return  # a file system without locks
        else:
            files.flock(two, LOCK_SH | LOCK_NB)
            self._refused(lambda: files.flock(two, LOCK_EX | LOCK_NB), BlockingIOError)
            files.close_folder(one)
            files.flock(two, LOCK_EX | LOCK_NB)
        finally:
            files.close_folder(two)

    @staticmethod
    def _refused(call: Any, error: type[OSError] = FileExistsError) -> None:
        try:
            call()
        except error:
            return
        raise AssertionError(f"no {error.__name__}")
