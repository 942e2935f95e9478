"""A real server's bucket does what `Storage` promises: by the contract that the simulated bucket keeps too."""

from __future__ import annotations

from pathlib import Path

import pytest
from cloud.server import Bucket

from ckpt_component.core.storage.locate import storage_at
from ckpt_component.core.storage.storage import Storage
from ckpt_component.testing.conformance import StorageContract


class TestBucketOfAServer(StorageContract):
    @pytest.fixture(autouse=True)
    def on_the_server(self, bucket: Bucket) -> None:
        self.bucket = bucket

    def storage(self, tmp_path: Path) -> tuple[Storage, str]:
        return storage_at(self.bucket.url, options=self.bucket.options), f"{self.bucket.url}/root"
