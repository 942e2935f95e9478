"""Files that Lightning itself has written: the weights, and as a full state."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_component import build_checkpointer

lightning = pytest.importorskip("lightning", "2.5", reason="needs lightning: pip install '.[lightning]'")

pytestmark = pytest.mark.filterwarnings("ignore")


class Module(lightning.LightningModule):  # type: ignore[name-defined]
    def __init__(self, width: int, extra: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = torch.nn.Linear(width, 2)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def test_a_file_of_lightning_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 3)), batch_size=4)
    module = Module(3, argparse.Namespace(a=1))
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, data)
    trainer.save_checkpoint(path := tmp_path / "last.ckpt")
    stock = torch.load(path, weights_only=False)
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters())
    with build_checkpointer("sync") as ours:
        ours.load(path, net, strict=True, rename={"state_dict.model": ""})
        assert torch.equal(net.weight, module.model.weight)
        state = {"net": net, "optimizer": optimizer, "global_step": 0, "epoch": 0}
        ours.load(path, state, strict=True, rename={"state_dict.model": "net", "optimizer_states.0": "optimizer"})
        loaded = ours.load(path)
    assert state["global_step"] == 4 and optimizer.param_groups[0]["lr"] == pytest.approx(0.001)
    stored = stock["optimizer_states"][0]["state"]
    assert all(
        torch.equal(optimizer.state[each]["exp_avg"], stored[n]["exp_avg"]) for n, each in enumerate(net.parameters())
    )
    assert "hyper_parameters.extra (argparse.Namespace)" in caplog.text
    assert stock["hyper_parameters"].pop("extra") and loaded["hyper_parameters"] == stock["hyper_parameters"]
    assert loaded["loops"] == stock["loops"] and loaded["lr_schedulers"] == stock["lr_schedulers"]
    assert loaded.keys() == stock.keys()
