"""The command `ckpt`: `app` has the table of commands, and a module each group of them."""
