"""What `ckpt doctor` checks, with the operations that a save uses. Imports no torch."""
