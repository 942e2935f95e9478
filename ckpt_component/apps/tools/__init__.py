"""The command `ckpt`: what one does beside a run. Each command is a module with `add` and `run`."""
