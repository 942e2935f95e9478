"""The benchmark, `ckpt-bench`: ours, stock torch, the peers, and the hardware's limits, in one run."""
