"""`hydra.utils.instantiate(cfg.checkpoint)` gives the manager, and the dataclasses of the schema work without composing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from hydra.core.config_store import ConfigStore
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from kept_configs import compose_once
from omegaconf import MISSING, DictConfig, OmegaConf

from ckpt_component import CheckpointConfigError, build_manager
from ckpt_component.config import (
    Checkpoint,
    DcpWriter,
    InlineCaller,
    LiveStager,
    PersistentCaller,
    PinnedStager,
    Save,
    SharedMemoryStager,
    TorchSaveWriter,
    config_dir,
)
from ckpt_component.config.schema import Load, Part
from ckpt_component.core.options import ChecksumName, Naming, Prove
from ckpt_component.managing.manager import CheckpointManager

#: Hydra 1.4 warns of every target that the caller has not allowed.
allowed: Callable[[], AbstractContextManager[Any]] = (
    (lambda: vars(hydra.utils)["execution_whitelist"]("ckpt_component.*"))
    if hasattr(hydra.utils, "execution_whitelist")
    else nullcontext
)
SYNC: dict[str, Any] = {"stager": LiveStager(), "caller": InlineCaller(), "writer": DcpWriter()}


@pytest.fixture(autouse=True)
def allow_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with allowed():
        yield


@pytest.fixture
def config() -> DictConfig:
    return compose_once("sync")


def text_of(call: Callable[[], Any]) -> str:
    """What is raised; Hydra 1.3 wraps what its targets raise."""
    with pytest.raises((CheckpointConfigError, InstantiationException)) as caught:
        call()
    error: BaseException = caught.value
    if isinstance(error, InstantiationException) and not isinstance(error, CheckpointConfigError):
        assert isinstance(error.__cause__, CheckpointConfigError)
        assert str(error).splitlines()[1] == f"CheckpointConfigError: {error.__cause__}"
        error = error.__cause__
    return str(error).splitlines()[0]


def test_it_gives_the_manager_of_the_config(config: DictConfig) -> None:
    with instantiate(config) as manager:
        assert isinstance(manager, CheckpointManager)
        manager.save(3, {"weight": torch.ones(2)})
    assert Path("checkpoints/iter_0000003/manifest.json").is_file()
    state = {"weight": torch.zeros(2)}
    with build_manager(config) as manager:
        assert manager.restore(state) == 3 and state["weight"].tolist() == [1, 1]


def test_keywords_of_the_call_win(config: DictConfig, tmp_path: Path) -> None:
    with instantiate(config, dir=tmp_path / "here", save={"every_steps": 2}, naming="step") as manager:
        assert [step for step in range(1, 5) if manager.maybe_save(step, {"weight": torch.ones(2)})] == [2, 4]
        assert manager.path_of(4) == str(tmp_path / "here" / "step_00000004")
    kept = {"save": Save(every_steps=3), "load": Load(prove=Prove.off)}
    with instantiate(config, dir="there", enabled=False, **kept) as manager:
        assert not manager.enabled


def test_a_keyword_may_be_a_dataclass_of_the_schema(config: DictConfig) -> None:
    with instantiate(config, writer=DcpWriter(checksum=ChecksumName.crc32), timeouts={"write": "30m"}) as manager:
        manager.save(1, {"weight": torch.ones(2)})


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["async_persistent", "async_zero_overhead", "off"])
def test_other_presets_too(preset: str) -> None:
    with instantiate(compose_once(preset), dir="own") as manager:
        assert manager.enabled == (preset != "off")


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"dri": "x"}, "There is no key checkpoint.dri. Did you mean checkpoint.dir?"),
        ({"overlap": "wiat"}, "checkpoint.overlap must be wait, skip or error, got wiat. Did you mean"),
        ({"dir": ""}, "checkpoint.dir is empty; name a folder"),
        ({"stager": None}, "checkpoint.stager is None, not a part; to pick one use a slash"),
    ],
)
def test_a_wrong_keyword_is_refused_in_words(config: DictConfig, keywords: Mapping[str, Any], text: str) -> None:
    assert text_of(lambda: instantiate(config, **keywords)).startswith(text)


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"save": 5}, "checkpoint.save cannot itself be of type int. The keys of checkpoint.save: every_steps"),
        (
            {"keep": {"best": "loss"}},
            "checkpoint.keep.best cannot itself be of type str. The keys of checkpoint.keep.b",
        ),
    ],
)
def test_a_value_in_the_place_of_keys_is_refused_in_words(
    config: DictConfig, keywords: Mapping[str, Any], text: str
) -> None:
    assert text_of(lambda: instantiate(config, **keywords)).startswith(text)


@pytest.mark.parametrize(("kind", "part"), [("stager", "pinned"), ("writer", "torch_save")])
def test_a_part_named_in_a_keyword_is_refused_with_what_to_type_instead(
    config: DictConfig, kind: str, part: str
) -> None:
    text = text_of(lambda: instantiate(config, **{kind: part}))
    assert text.startswith(f"checkpoint.{kind}") and f"checkpoint/{kind}=" in text and part in text


@pytest.mark.skipif(hydra.__version__ >= "1.4", reason="Hydra 1.4 replaces the part")
@pytest.mark.parametrize("part", [PinnedStager(), TorchSaveWriter()])
def test_another_part_as_a_keyword_is_refused_with_what_to_type_instead(config: DictConfig, part: Part) -> None:
    kind, option = ("stager", "pinned") if isinstance(part, PinnedStager) else ("writer", "torch_save")
    text = text_of(lambda: instantiate(config, **{kind: part}))
    assert f"use build_manager(cfg.checkpoint, ['checkpoint/{kind}={option}'])" in text
    with build_manager(config, [f"checkpoint/{kind}={option}", "checkpoint.enabled=false"]):
        pass


@pytest.mark.parametrize("kind", ["stager", "caller", "writer"])
def test_a_part_that_was_built_before_is_refused_in_words(config: DictConfig, kind: str) -> None:
    part = instantiate(config[kind])  # a part alone can be built
    text = f"is a {type(part).__name__} that was built already, and the manager builds its parts itself; pass configs: "
    assert text in text_of(lambda: instantiate(config, **{kind: part}))
    assert text in text_of(lambda: build_manager({**config, kind: part}))
    assert text in text_of(lambda: build_manager(Checkpoint(**{**SYNC, kind: part})))


def test_a_config_that_was_instantiated_with_its_parts_is_refused_in_words(config: DictConfig) -> None:
    assert "that was built already" in text_of(lambda: instantiate(config, _recursive_=True))
    plain = OmegaConf.to_container(config)
    assert isinstance(plain, dict)
    del plain["_target_"], plain["_recursive_"]  # a file that a user wrote
    with build_manager(plain):
        pass
    assert "that was built already" in text_of(lambda: build_manager(instantiate(OmegaConf.create(plain))))


def test_a_manager_in_the_place_of_a_config_is_refused_in_words(config: DictConfig) -> None:
    with instantiate(config) as manager, pytest.raises(CheckpointConfigError) as caught:
        build_manager(manager)
    assert str(caught.value) == (
        "The checkpoint config is a CheckpointManager, which was built already: use it as it is. If instantiate built "
        "it inside another object, put _recursive_: false beside the _target_ of that."
    )


def test_the_dataclasses_work_without_composing() -> None:
    config = Checkpoint(dir="mine", naming=Naming.step, save=Save(every_steps=7), **SYNC)
    for manager in (build_manager(config), instantiate(config)):
        with manager:
            assert manager.path_of(7).endswith("mine/step_00000007")
    assert text_of(lambda: build_manager(Checkpoint(dir="mine"))).startswith("checkpoint.stager is missing")


@dataclass
class Typed:
    """A structured config that takes the preset of its defaults list."""

    defaults: list[Any] = field(default_factory=lambda: [{"checkpoint": "sync"}, "_self_"])
    lr: float = 1.0
    checkpoint: Checkpoint = MISSING


@dataclass
class Whole:
    """A structured config with all of it."""

    lr: float = 1.0
    checkpoint: Checkpoint = field(
        default_factory=lambda: Checkpoint(
            stager=SharedMemoryStager(), caller=PersistentCaller(), writer=DcpWriter(workers=3)
        )
    )


@pytest.fixture(scope="module", autouse=True)
def stored() -> Iterator[None]:
    """As a user's module does when it is imported; other tests list the options of the group."""
    store = ConfigStore.instance()
    store.store(name="test_Typed", node=Typed)
    store.store(name="test_Whole", node=Whole)
    store.store(group="checkpoint", name="test_mine", node=Checkpoint(dir="mine", **SYNC))
    yield
    del store.repo["test_Typed.yaml"], store.repo["test_Whole.yaml"], store.repo["checkpoint"]["test_mine.yaml"]
    if not store.repo["checkpoint"]:
        del store.repo["checkpoint"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "overrides", "expected"),
    [
        (Typed, [], ("LiveStager", 2)),
        (Typed, ["checkpoint=async_persistent", "checkpoint/stager=pinned"], ("PinnedStager", 2)),
        (Typed, ["checkpoint.naming=step", "checkpoint.timeouts.write=30m"], ("LiveStager", 2)),
        (Typed, ["checkpoint.writer.workers=4", "checkpoint.writer.block_bytes=4MB"], ("LiveStager", 4)),
        (Whole, ["checkpoint.on_error=warn"], ("SharedMemoryStager", 3)),
        (Whole, ["checkpoint.writer.workers=5"], ("SharedMemoryStager", 5)),
    ],
)
def test_they_are_types_of_structured_configs(
    schema: type, overrides: list[str], expected: tuple[str, int], hydra_version: dict[str, str]
) -> None:
    with hydra.initialize_config_dir(str(config_dir()), **hydra_version):
        config = hydra.compose(f"test_{schema.__name__}", overrides)
    assert (config.checkpoint.stager._target_.rpartition(".")[2], config.checkpoint.writer.workers) == expected
    with build_manager(config.checkpoint, dir="built"), instantiate(config.checkpoint, dir="instantiated"):
        pass


def test_values_of_a_preset_are_not_lost_in_a_structured_config(hydra_version: dict[str, str]) -> None:
    with hydra.initialize_config_dir(str(config_dir()), **hydra_version):
        assert not hydra.compose("test_Typed", ["checkpoint=off"]).checkpoint.enabled


def test_a_dataclass_may_be_an_option_of_the_group(hydra_version: dict[str, str]) -> None:
    with hydra.initialize_config_dir(str(config_dir()), **hydra_version):
        config = hydra.compose(overrides=["+checkpoint=test_mine"])
    with build_manager(config.checkpoint) as manager:
        assert manager.path_of(1).endswith("mine/iter_0000001")
