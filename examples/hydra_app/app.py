"""A Hydra app of your own with the group `checkpoint`: choose a preset and set its keys on the command line.

python examples/hydra_app/app.py checkpoint=async_persistent checkpoint.save.every_steps=20
python examples/hydra_app/app.py -m checkpoint.writer.workers=1,2,4
"""

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from ckpt_component import build_manager


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    """Train for some steps; with an absolute `checkpoint.dir`, from its newest checkpoint on."""
    torch.manual_seed(config.seed)
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
    state = {"model": model, "optimizer": optimizer}
    # `checkpoint.dir` is relative to the job's folder of Hydra, so the jobs of a sweep keep apart.
    with build_manager(config.checkpoint) as manager:
        start = manager.restore(state) or 0
        for step in range(start + 1, config.steps + 1):
            loss = model(torch.randn(16, 256)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            manager.maybe_save(step, state)
    print(f"{HydraConfig.get().runtime.output_dir}: steps {start + 1} to {config.steps}, checkpoints {manager.steps()}")


if __name__ == "__main__":
    main()
