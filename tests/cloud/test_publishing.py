"""Versions of weights in a bucket, against a real S3 server: the same files, committed by the manifest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cloud.server import Bucket
from publishing.publish_worlds import bytes_of, publish, publisher, save, weights_at
from publishing.published_format import pull

from ckpt_component.core.commit.manifest import check_files, data_folder
from ckpt_component.core.storage.locate import storage_at
from ckpt_component.publishing.delta import DeltaFiles
from ckpt_component.publishing.versions import Versions, chain_to

pytestmark = pytest.mark.slow


def fetch(bucket: str, to: Path) -> list[int]:
    """Copy the files of all versions to where a reader of folders finds them."""
    storage = storage_at(bucket)
    versions = Versions(storage, bucket).look()
    for number, version in versions.items():
        folder = data_folder(storage, version.path, version.manifest)
        check_files(storage, folder, version.manifest)
        here = to / f"weight_v{number:06d}"
        here.mkdir(parents=True)
        for entry in version.manifest["files"]:
            (here / entry["name"]).write_bytes(storage.read(os.path.join(folder, entry["name"]), entry["size"]))
    return [*versions]


def test_versions_in_a_bucket(bucket: Bucket, tmp_path: Path) -> None:
    to, models = f"{bucket.url}/policy", {step: weights_at(step) for step in range(1, 6)}
    for step, model in models.items():
        path = save(tmp_path, step, model)
        done = publish(publisher(to, tmp_path / "mirror", keep=2, whole_every=2), path, step)
        assert (done.version, done.is_whole) == (step, step in (1, 4))
    assert fetch(to, tmp_path / "copy") == [4, 5]
    assert {number: pull(tmp_path / "copy", number) for number in (4, 5)} == {n: bytes_of(models[n]) for n in (4, 5)}
    storage = storage_at(to)
    versions = Versions(storage, to).look()
    assert [version.number for version in chain_to(versions, 5, 4)] == [5]
    assert set(DeltaFiles(storage, versions[5]).names()) == {"embed", "layers.0.weight", "scale"}
    assert storage.names(to) == [".ckpt-owner.json", "weight_v000004", "weight_v000005"]


def test_a_version_that_was_given_up_in_a_bucket_leaves_its_number(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = f"{bucket.url}/policy"
    publish(publisher(to, tmp_path / "mirror"), save(tmp_path, 1, weights_at(1)), 1)
    storage = storage_at(to)
    made = publisher(to, tmp_path / "mirror", storage=storage)

    put_new = storage.put_new

    def refuse(path: str, data: bytes, draft: str) -> None:
        if path.endswith("manifest.json"):
            raise ConnectionResetError("the store has gone")
        put_new(path, data, draft)

    path = save(tmp_path, 2, weights_at(2))
    with monkeypatch.context() as patch, pytest.raises(Exception, match="the store has gone"):
        patch.setattr(storage, "put_new", refuse)
        publish(made, path, 2)
    assert [*Versions(storage, to).look()] == [1]
    done = publish(publisher(to, tmp_path / "mirror"), path, 2)
    assert (done.version, done.is_whole) == (2, True)
    assert fetch(to, tmp_path / "copy") == [1, 2] and pull(tmp_path / "copy", 2) == bytes_of(weights_at(2))
