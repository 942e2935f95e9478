"""Azure's and Google's storage: whole runs, requests whose answers are lost, and what a user mistypes.

Azure is Azurite: `npm install --prefix azurite azurite@3.37.0`, then AZURITE=azurite/node_modules/.bin/azurite-blob. By
hand: AZURE_STORAGE_ENDPOINT=http://127.0.0.1:10000/devstoreaccount1, AZURE_ALLOW_HTTP=true, and its account's name and key.

No emulator of Google's speaks the part of its XML API that obstore uses, so `gs://` is moto's S3 server, which has the
same requests but for one header (`server.py`): that shows what this package and obstore do, and not what Google's servers
answer. Tried with obstore 0.12.1: fake-gcs-server 1.54.0 refuses puts (`invalid uploadType`); storage-testbench 0.45.0 and
gcp-storage-emulator 2026.7.19 answer without an ETag and have neither listings nor multipart uploads, but storage-testbench
does answer a second conditional put with 412.
"""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from cloud.azurite import ACCOUNT, KEY, Azurite, start_azurite
from cloud.proxy import Answer, Call, CutAfter, FaultProxy, Request, Strip
from cloud.server import S3Server
from cloud.test_ckpt_s3 import ckpt
from cloud.test_object_requests import is_manifest
from inside import tidied
from strides import first_of

from ckpt_component import CheckpointConfigError, CheckpointFencedError, build_manager
from ckpt_component.core.commit.names import MEGATRON
from ckpt_component.core.commit.scan import scan_steps
from ckpt_component.core.storage.locate import storage_at
from ckpt_component.managing.manager import CheckpointManager

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Container:
    """An empty bucket; the environment leads to it, through the proxy.

    Attributes:
        url: of a root in it.
        proxy: in front of its server.
        secret: what no text may have.
    """

    url: str
    proxy: FaultProxy
    secret: str

    @property
    def missing(self) -> str:
        """A root in a bucket that is not there."""
        return self.url.replace("://", "://no")


@pytest.fixture(scope="session")
def azurite_if_here() -> Iterator[Azurite | None]:
    server = start_azurite()
    yield server
    if server is not None:
        server.close()


@pytest.fixture
def azurite(azurite_if_here: Azurite | None) -> Azurite:
    """The server of this worker."""
    pytest.importorskip("obstore", reason="needs the extra cloud")
    if azurite_if_here is None:
        pytest.skip("needs Azurite: npm install --prefix FOLDER azurite; AZURITE=FOLDER/node_modules/.bin/azurite-blob")
    return azurite_if_here


@pytest.fixture(params=["az", "gs"])
def container(
    request: pytest.FixtureRequest,
    azurite_if_here: Azurite | None,  # first, so that it is no process of the test
    s3_server: S3Server,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Container]:
    name = f"test{uuid.uuid4().hex[:12]}"  # moto does not decode a bucket's name
    if request.param == "az":
        azurite: Azurite = request.getfixturevalue("azurite")
        azurite.make_container(name)
        proxy, secret = FaultProxy(azurite.port), KEY
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{proxy.endpoint}/{ACCOUNT}")
        monkeypatch.setenv("AZURE_ALLOW_HTTP", "true")
    else:
        s3_server.request("PUT", f"/{name}")
        proxy, secret = FaultProxy(s3_server.port), "not-a-secret"
        account = {"gcs_base_url": proxy.endpoint, "disable_oauth": True, "client_email": "", "private_key_id": ""}
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps({**account, "private_key": secret}))
        monkeypatch.setenv("GOOGLE_ALLOW_HTTP", "true")
    yield Container(f"{request.param}://{name}/runs/one", proxy, secret)
    proxy.close()


def state(step: int) -> dict[str, Any]:
    return {"weights": torch.full((2_500_000,), float(step)), "step": step}


def manager_at(root: str, *overrides: str, preset: str = "sync") -> CheckpointManager:
    usual = ["checkpoint.save.every_steps=1", "checkpoint.keep.last=2", "checkpoint.save.at_end=false"]
    return build_manager(preset, [*usual, *overrides], dir=root)


def restored(root: str, *overrides: str) -> tuple[int | None, float]:
    target = state(0)
    with manager_at(root, "checkpoint.save.every_steps=null", *overrides) as manager:
        step = manager.restore(target)
    assert target["step"] == (step or 0)
    return step, target["weights"].unique().item()


def committed(root: str) -> list[int]:
    return scan_steps(storage_at(root), root, MEGATRON).committed


@pytest.mark.parametrize("preset", ["sync", "async_persistent"])
def test_a_run_saves_retires_and_resumes(container: Container, preset: str) -> None:
    root = container.url
    with manager_at(root, "checkpoint.keep.best.metric=loss", preset=preset) as manager:
        for step, loss in {1: 3.0, 2: 1.0, 3: 4.0, 4: 2.0, 5: 5.0}.items():
            manager.save(step, state(step), metrics={"loss": loss})
    assert committed(root) == [2, 4, 5]
    assert restored(root) == (5, 5.0)
    best = ["checkpoint.resume=best", "checkpoint.keep.best.metric=loss"]
    assert restored(root, *best) == (2, 2.0)
    with manager_at(root, preset=preset) as manager:
        assert manager.restore(state(0)) == 5
        manager.save(6, state(6))
    names = storage_at(root).names(root)
    assert [name for name in names if name.startswith(("iter", ".ckpt-a", ".ckpt-t"))] == [
        "iter_0000005",
        "iter_0000006",
    ]


def test_a_second_run_takes_over(container: Container) -> None:
    with manager_at(container.url) as first, manager_at(container.url) as second:

        def overtake(request: Request) -> None:
            second.save(1, state(1))

        rule = container.proxy.add(Call(overtake), where=is_manifest)
        with pytest.raises(CheckpointFencedError, match="took over"):
            first.save(1, state(0))
        assert len(rule.hits) == 1 and second.steps() == [1]
        second.save(2, state(2))
    assert restored(container.url) == (2, 2.0) and restored(container.url, "checkpoint.resume=1") == (1, 1.0)


@pytest.mark.parametrize("stride", [25, pytest.param(1, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
def test_any_answer_may_be_lost(container: Container, stride: int) -> None:
    """Azure and Google say of a repeated removal that there is nothing to remove."""
    with manager_at(container.url, "checkpoint.keep.last=1") as manager:
        manager.save(1, state(1))
        for nth, step in zip(itertools.count(first_of(stride), stride), itertools.count(2), strict=False):
            container.proxy.clear()
            rule = container.proxy.add(CutAfter(), nth=nth)
            manager.save(step, state(step))
            tidied(manager)
            container.proxy.clear()
            assert manager.steps() == [step], f"request {nth}: {rule.hits}"
            if not rule.hits:
                break
    assert step > 2
    names = storage_at(container.url).names(container.url)
    assert [name for name in names if name.startswith(("iter", ".ckpt-a", ".ckpt-t"))] == [MEGATRON.folder(step)]


def test_what_is_gone_already_is_removed(container: Container) -> None:
    """The removal of another process comes first."""
    root = container.url
    storage, other = storage_at(root), storage_at(root)
    for name in ("one", "two", "three"):
        storage.write_new(f"{root}/{name}", b"1")
    removal = Call(lambda request: other.unlink(f"{root}/one"))

    def removes_one(request: Request) -> bool:
        """Google's store is asked for each object by itself, for several at a time: only "one" is not removed yet."""
        return request.method == "POST" or (request.method == "DELETE" and request.key.endswith("one"))

    container.proxy.add(removal, where=removes_one)
    storage.remove_tree(root)
    assert storage.names(root) == []
    storage.write_new(f"{root}/one", b"1")
    container.proxy.add(removal, where=lambda request: request.method == "DELETE")
    storage.unlink(f"{root}/one")
    with pytest.raises(FileNotFoundError):
        storage.unlink(f"{root}/one")


def test_two_tiers(container: Container, tmp_path: Path) -> None:
    fast = [f"checkpoint.local.dir={tmp_path / 'fast'}", "checkpoint.local.keep_last=1"]
    with manager_at(container.url, *fast) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
    assert committed(container.url)[-1] == 3
    assert restored(container.url) == (3, 3.0)


def test_ckpt(container: Container, tmp_path: Path) -> None:
    root, local = container.url, tmp_path / "local"
    with manager_at(str(local)) as manager:
        manager.save(100, state(100))
        manager.save(200, state(200))
    text = ""
    for words in (
        ["cp", f"{local}@200", f"{root}/"],
        ["cp", f"{root}@200", f"{root}/copy/"],
        ["cp", f"{root}@200", f"{tmp_path}/back/"],
        ["ls", root],
        ["show", root],
        ["verify", root],
        ["diff", root, f"{tmp_path}/back@200"],
        ["doctor", root],
        ["mv", f"{root}@200", f"{root}@300"],
        ["gc", root],
        ["rm", "--force", f"{root}@300"],
    ):
        code, out, err = ckpt(*words)
        assert code == 0, (words, out, err)
        text += out + err
    assert container.secret not in text
    assert committed(root) == [] and committed(f"{root}/copy") == [200]


def test_mistakes(container: Container) -> None:
    proxy, root = container.proxy, container.url
    code, _, err = ckpt("ls", container.missing)
    assert code == 2 and err.count("\n") == 2 and "create the bucket" in err
    with pytest.raises(CheckpointConfigError, match="cannot be written to") as caught:
        build_manager("sync", dir=container.missing)
    assert "404 Not Found" in str(caught.value) and "\n" not in str(caught.value)
    proxy.add(Answer(403), times=None)
    code, _, err = ckpt("ls", root)
    assert code == 2 and err.count("\n") == 2 and "403" in err and "credentials" in err
    if root.startswith("gs:"):  # a request to Azure without a header that was signed is refused
        proxy.clear()
        proxy.add(Strip("x-goog-if-generation-match"), times=None)
        with pytest.raises(CheckpointConfigError, match="If-None-Match"):
            build_manager("sync", dir=root)


def test_a_wrong_key_of_azure(azurite: Azurite) -> None:
    azurite.make_container(name := f"test-{uuid.uuid4().hex[:12]}")
    usual = ["-o", f"account_name={ACCOUNT}", "-o", f"endpoint=http://127.0.0.1:{azurite.port}/{ACCOUNT}"]
    for secret, text in (("d3Jvbmctc2VjcmV0", "credentials"), ("no base 64", "Invalid Access Key")):
        code, _, err = ckpt("ls", f"az://{name}/run", *usual, "-o", "allow_http=true", "-o", f"account_key={secret}")
        assert code == 2 and err.count("\n") <= 2 and text in err and secret not in err
    code, _, err = ckpt("ls", "az://Bad_Name/run", *usual, "-o", "allow_http=true", "-o", f"account_key={KEY}")
    assert code == 2 and err.count("\n") == 2 and "correct the name" in err


def test_credentials_that_no_server_gives() -> None:
    pytest.importorskip("obstore", reason="needs the extra cloud")
    given = {"account_name": "one", "tenant_id": "two", "client_id": "three", "client_secret": "not-a-secret"}
    options = {**given, "authority_host": "http://127.0.0.1:9", "allow_http": "true", "max_retries": "0"}
    code, _, err = ckpt("ls", "az://some/run", *(text for item in options.items() for text in ("-o", "=".join(item))))
    assert code == 2 and err.count("\n") == 2 and "credentials" in err and "not-a-secret" not in err
