"""`python -m ckpt_component.apps.tools`, the same as `ckpt`."""

from .app import main

if __name__ == "__main__":
    main()
