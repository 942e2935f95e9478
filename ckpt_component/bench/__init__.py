"""The benchmark: `python -m ckpt_component.bench`. Ours, stock torch, and the hardware's limits, in one run."""
