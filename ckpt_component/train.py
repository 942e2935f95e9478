"""`python -m ckpt_component.train`, the same as `ckpt-train`."""

from .apps.train import main

if __name__ == "__main__":
    main()
