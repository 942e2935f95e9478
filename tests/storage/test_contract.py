"""All storages do what `Storage` promises: ours, those that the tests simulate, and one that the tests fake."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.object_store import ObjectStore

from ckpt_component.core.storage.files import FileStorage
from ckpt_component.core.storage.locate import storage_at
from ckpt_component.core.storage.storage import Storage
from ckpt_component.testing import Disk, SimulatedBucket, SimulatedFiles, SimulatedObjects
from ckpt_component.testing.conformance import StorageContract


class TestFiles(StorageContract):
    def storage(self, tmp_path: Path) -> tuple[Storage, str]:
        return FileStorage(), str(tmp_path)


class TestFilesWithoutRenames(StorageContract):
    def storage(self, tmp_path: Path) -> tuple[Storage, str]:
        return FileStorage(atomic_rename=False), str(tmp_path)


class TestSimulatedFiles(StorageContract):
    renames = True

    def storage(self, tmp_path: Path) -> tuple[Storage, str]:
        files = SimulatedFiles(Disk(), atomic_rename=self.renames, locks=self.renames)
        files.make_folders("/root")
        return files, "/root"


class TestSimulatedFilesWithoutRenames(TestSimulatedFiles):
    renames = False


class TestMountedObjects(StorageContract):
    def storage(self, tmp_path: Path) -> tuple[Storage, str]:
        (tmp_path / "uploads").mkdir()
        (tmp_path / "root").mkdir()
        return ObjectStore(str(tmp_path / "uploads")), str(tmp_path / "root")


class TestObjects(StorageContract):
    def storage(self, tmp_path: Path) -> tuple[Storage, str]:
        pytest.importorskip("obstore", reason="pip install 'ckpt_component[cloud]'")
        return storage_at("memory://bucket"), f"memory://bucket/{tmp_path.name}"


class TestSimulatedObjects(StorageContract):
    """By the same contract as the bucket of obstore: what holds in the simulation holds of requests, too."""

    def storage(self, tmp_path: Path) -> tuple[Storage, str]:
        return SimulatedBucket(SimulatedObjects()), "/root"
