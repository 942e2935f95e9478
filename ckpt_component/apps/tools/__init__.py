"""The command `ckpt`: tools beside a training run. Each subcommand is a module with `add` and `run`."""
