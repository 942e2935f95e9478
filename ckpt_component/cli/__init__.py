"""The command `ckpt`, tools beside a training run. Each command is a module; `app` says what it has."""
