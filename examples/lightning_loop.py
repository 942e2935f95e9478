"""Lightning with exact resume: run it again, or kill it and run it again. Needs the extra `lightning`.

python examples/lightning_loop.py
"""

import argparse
import logging

import lightning as L
import torch

from ckpt_component.integrations.lightning import CheckpointCallback

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
arguments = parser.parse_args()


class Model(L.LightningModule):
    """Adds up its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(), torch.nn.Linear(64, 1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """One loss, logged for `monitor`."""
        loss = (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters())


logging.basicConfig(level=logging.INFO, format="%(message)s")
L.seed_everything(1)
data = torch.utils.data.DataLoader(torch.randn(1600, 32), batch_size=16, shuffle=True)
# It saves and restores random states and the position in the data too; `monitor` keeps the best checkpoint.
callback = CheckpointCallback(overrides=["checkpoint.save.every_steps=50"], dir="runs/lightning", monitor="loss")
trainer = L.Trainer(
    max_steps=arguments.steps,
    accelerator="auto",
    devices=1,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[callback],
)
trainer.fit(Model(), data)
print(f"step {trainer.global_step}: loss {trainer.callback_metrics['loss'].item():.6f}")
