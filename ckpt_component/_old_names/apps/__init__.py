"""Its rooms stand in `ckpt_component.cli`, `ckpt_bench` and `ckpt_train`."""
