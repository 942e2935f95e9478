"""The checksums that items are stored with: right values, in pieces too, and what is said where a package is missing."""

from __future__ import annotations

import itertools
import json
import logging
import random
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from forging import edit_table
from strides import in_turn

from ckpt_component import CheckpointConfigError, CheckpointCorruptError, CheckpointLoadError, build_checkpointer
from ckpt_component.core.storage.checksum import (
    ALGORITHMS,
    PROVIDERS,
    ChecksumMissingError,
    Provider,
    fastest,
    find_checksum,
    home_of,
)

#: Those that no Python has by itself, with the package to install.
OTHERS = {"xxh3_64": "xxhash", "crc32c": "crc32c"}
ROOT = Path(__file__).resolve().parents[2]
#: From the algorithms' own descriptions: some bytes and their checksum.
KNOWN = {
    "crc32": (b"123456789", 0xCBF43926),
    "crc32c": (b"123456789", 0xE3069283),
    "xxh3_64": (b"", 0x2D06800538D394C2),
}


def installed(name: str) -> str:
    """The algorithm, or the test is skipped."""
    try:
        return find_checksum(name).name
    except ChecksumMissingError as error:
        pytest.skip(str(error))


def without(monkeypatch: pytest.MonkeyPatch, *providers: Provider) -> None:
    """As if their packages were not installed."""
    for provider in providers:
        monkeypatch.setitem(sys.modules, provider.module, None)


def of_algorithm(name: str) -> list[Provider]:
    return [provider for provider in PROVIDERS if provider.name == name]


@pytest.mark.parametrize("provider", PROVIDERS, ids=lambda provider: provider.package)
def test_whole_and_in_pieces_it_is_the_same_value(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, *(other for other in of_algorithm(provider.name) if other is not provider))
    installed(provider.name)
    rng = random.Random(3)
    data = memoryview(rng.randbytes(1_000_003))
    checksum = find_checksum(provider.name)
    assert (checksum.name, checksum.package) == (provider.name, provider.package)
    cuts = sorted({0, len(data), *(rng.randrange(len(data)) for _ in range(20))})
    pieces = [data[start:end] for start, end in itertools.pairwise(cuts)]
    nothing = memoryview(b"")
    for taken, whole in ((pieces, data), ([data], data), ([], nothing)):
        stream = checksum.stream()
        for piece in taken:
            stream.update(piece)
        assert stream.value() == checksum.of(whole)
    assert checksum.of(memoryview(bytearray(data))) == checksum.of(data)
    known, value = KNOWN[provider.name]
    assert checksum.of(memoryview(known)) == value


def test_auto_is_the_fastest_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = list[str]()
    while not taken or taken[-1] != "zlib":
        found = fastest()
        taken.append(found.package)
        (provider,) = [each for each in PROVIDERS if each.package == found.package]
        assert provider.name == found.name
        without(monkeypatch, provider)
    order = [provider.package for provider in PROVIDERS]
    assert taken == sorted(taken, key=order.index) and order[-1] == "zlib"


@pytest.mark.parametrize("writer", ["dcp", "torch_save", "safetensors"])
def test_auto_says_in_one_line_what_it_took(writer: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ckpt_component"):
        build_checkpointer("sync", [f"checkpoint/writer={writer}", "checkpoint.writer.checksum=auto"]).close()
    said = [record.message for record in caplog.records if "checksum" in record.message]
    name, package = fastest().name, fastest().package
    assert said == [f"checkpoint.writer.checksum=auto: {name} by {package}, the fastest that is installed"]


@pytest.mark.parametrize("name", OTHERS)
def test_a_package_that_is_missing_is_an_error_at_build(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, *of_algorithm(name))
    with pytest.raises(CheckpointConfigError, match=f"writer.checksum={name} .*: pip install {OTHERS[name]}"):
        build_checkpointer("sync", [f"checkpoint.writer.checksum={name}"])
    with pytest.raises(CheckpointConfigError, match="checksum"):
        build_checkpointer("sync", ["checkpoint.writer.checksum=md5"])


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    large = torch.randn(40_000, generator=generator)  # longer than a block, so that its checksum is taken in pieces
    return {"large": large, "small": torch.arange(7), "none": torch.empty(0), "last": torch.empty(0, dtype=torch.uint8)}


@pytest.mark.parametrize(
    ("name", "writer", "preset"),
    in_turn(product(ALGORITHMS, ["dcp", "torch_save", "safetensors"], ["sync", "async_persistent"]), 3),
)
def test_every_writer_stores_and_checks_it(name: str, writer: str, preset: str, tmp_path: Path) -> None:
    """Also in the writer process, which finds the package although it runs without site-packages."""
    installed(name)
    overrides = [f"checkpoint/writer={writer}", f"checkpoint.writer.checksum={name}"]
    with build_checkpointer(preset, [*overrides, "checkpoint.writer.block_bytes=4096"]) as ours:
        futures = ours.save(state(), tmp_path / "one")
        if futures is not None:
            futures[1].result()
        table = json.loads((tmp_path / "one" / "integrity-0.json").read_bytes())
        assert table["checksum"] == name
        loaded = ours.load(tmp_path / "one")
        assert all(torch.equal(value, loaded[key]) for key, value in state().items())
        (path,) = [path for path in (tmp_path / "one").iterdir() if path.stat().st_size > 160_000]
        whole = bytearray(path.read_bytes())
        whole[90_000] ^= 1
        path.write_bytes(whole)
        with pytest.raises(CheckpointCorruptError, match=path.name):
            ours.load(tmp_path / "one")


@pytest.mark.parametrize("name", OTHERS)
def test_a_reader_without_the_package_says_what_to_install(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(name)
    for writer in ("dcp", "torch_save", "safetensors"):
        overrides = [f"checkpoint/writer={writer}", f"checkpoint.writer.checksum={name}"]
        with build_checkpointer("sync", overrides) as ours:
            ours.save(state(), tmp_path / writer)
    without(monkeypatch, *of_algorithm(name))
    for writer in ("dcp", "torch_save", "safetensors"):
        with (
            build_checkpointer("sync") as ours,
            pytest.raises(CheckpointLoadError, match=f"pip install {OTHERS[name]}, or .*verify=off"),
        ):
            ours.load(tmp_path / writer)
        with build_checkpointer("sync", ["checkpoint.verify=off"]) as ours:
            assert torch.equal(ours.load(tmp_path / writer)["large"], state()["large"])


def test_tables_of_before_there_was_a_choice_load_and_unknown_algorithms_are_named(tmp_path: Path) -> None:
    def older(table: dict[str, Any]) -> None:
        del table["checksum"]
        table["crc32"] = table.pop("sums")

    with build_checkpointer("sync") as ours:
        ours.save(state(), tmp_path / "one")
        edit_table(tmp_path / "one", older)
        assert torch.equal(ours.load(tmp_path / "one")["large"], state()["large"])
        ours.save(state(), tmp_path / "two")
        edit_table(tmp_path / "two", lambda table: table.__setitem__("checksum", "sha9"))
        with pytest.raises(CheckpointLoadError, match="'sha9', which this release does not know"):
            ours.load(tmp_path / "two")


@pytest.mark.parametrize("saves, loads", [("isal", "zlib"), ("zlib", "isal")])
@pytest.mark.parametrize("preset", ["sync", "async_persistent"])
def test_who_computes_crc32_makes_no_difference(
    saves: str, loads: str, preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also to many small tensors, whose sums are put together."""
    hidden = {provider.package: provider for provider in of_algorithm("crc32")}
    values = state() | {f"many.{number}": torch.full((number,), float(number)) for number in range(200)}
    for package, other in ((saves, loads), (loads, saves)):
        with monkeypatch.context() as only:
            without(only, hidden[other])
            installed("crc32")
            assert find_checksum("crc32").package == package
            with build_checkpointer(preset) as ours:
                if package == saves:
                    futures = ours.save(values, tmp_path / "one")
                    if futures is not None:
                        futures[1].result()
                else:
                    loaded = ours.load(tmp_path / "one")
    assert all(torch.equal(value, loaded[key]) for key, value in values.items())


@pytest.mark.parametrize("provider", PROVIDERS[:-1], ids=lambda provider: provider.package)
def test_a_process_without_site_packages_gets_that_one_package(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, *(other for other in of_algorithm(provider.name) if other is not provider))
    installed(provider.name)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); before = list(sys.path); "
        "from ckpt_component.core.storage.checksum import find_checksum; "
        "checksum = find_checksum(sys.argv[2], sys.argv[3]); "
        "assert sys.path == before; print(checksum.package, checksum.of(memoryview(b'123456789')))"
    )
    home = home_of(provider.name)
    assert home is not None
    command = [sys.executable, "-I", "-S", "-c", code, str(ROOT), provider.name]
    done = subprocess.run([*command, home], capture_output=True, text=True, timeout=60, check=True)
    package, value = done.stdout.split()
    assert (package, int(value)) == (provider.package, find_checksum(provider.name).of(memoryview(b"123456789")))
    gone = subprocess.run([*command, "/nowhere"], capture_output=True, text=True, timeout=60, check=False)
    if provider.name == "crc32":
        assert gone.stdout.split()[0] == "zlib"
    else:
        assert "not installed in /nowhere, where the trainer found it: pip install" in gone.stderr


def test_what_every_python_has_is_looked_for_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, *of_algorithm("crc32")[:-1])
    assert home_of("crc32") is None and find_checksum("crc32").package == "zlib"
