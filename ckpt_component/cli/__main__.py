"""`python -m ckpt_component.cli`, the same as `ckpt`."""

from .app import main

if __name__ == "__main__":
    main()
