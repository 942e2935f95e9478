"""`callbacks: ckpt` as lightning-hydra-template takes it: each node below `callbacks` is instantiated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra.utils import instantiate
from omegaconf import DictConfig

from ckpt_component import CheckpointConfigError
from ckpt_component.config import config_dir

L = pytest.importorskip("lightning")
torch = pytest.importorskip("torch")

SEARCHPATH = "hydra.searchpath=[pkg://ckpt_component.integrations.conf]"


@pytest.fixture(autouse=True)
def allow_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hydra 1.4 warns of targets that the caller has not allowed."""
    monkeypatch.chdir(tmp_path)
    allow = getattr(hydra.utils, "execution_whitelist", None)
    with allow("ckpt_component.*", "lightning.*") if allow else nullcontext():
        yield


def callbacks_of(node: DictConfig) -> list[Any]:
    """The template's `instantiate_callbacks`."""
    return [instantiate(value) for value in node.values() if isinstance(value, DictConfig) and "_target_" in value]


def composed(*overrides: str) -> DictConfig:
    version = {"version_base": "1.3"} if hydra.__version__ < "1.4" else {}
    with hydra.initialize_config_dir(str(config_dir()), **version):
        return hydra.compose(overrides=[SEARCHPATH, "+callbacks=ckpt", *overrides])


class Module(L.LightningModule):  # type: ignore[name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, index: int) -> Any:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_trainer_saves_and_resumes_with_it(tmp_path: Path) -> None:
    steps = []
    for epochs in (1, 2):
        config = composed("callbacks.ckpt.checkpoint.save.every_steps=2", "callbacks.ckpt.dir=runs")
        [callback] = callbacks_of(config.callbacks)
        trainer = L.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            logger=False,
            callbacks=[callback],
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2))
        steps.append(trainer.global_step)
    assert steps == [4, 8] and (tmp_path / "runs" / "iter_0000008" / "manifest.json").is_file()


def test_a_node_that_was_instantiated_before_the_callback_is_refused_in_words() -> None:
    node = composed("checkpoint@callbacks.ckpt.checkpoint=sync").callbacks.ckpt
    with pytest.raises(Exception, match="put _recursive_: false beside the _target_ of that") as caught:
        instantiate(node, _recursive_=True)
    assert isinstance(caught.value.__cause__ or caught.value, CheckpointConfigError)


def test_a_preset_by_name_needs_no_more(tmp_path: Path) -> None:
    target = "ckpt_component.integrations.lightning.CheckpointCallback"
    [callback] = callbacks_of(DictConfig({"ckpt": {"_target_": target, "checkpoint": "sync", "dir": str(tmp_path)}}))
    assert type(callback).__name__ == "CheckpointCallback"


def test_a_typo_is_refused_when_the_callback_is_built() -> None:
    with pytest.raises(Exception, match=r"Did you mean checkpoint\.overlap=skip\?"):
        callbacks_of(composed("callbacks.ckpt.checkpoint.overlap=skp").callbacks)
