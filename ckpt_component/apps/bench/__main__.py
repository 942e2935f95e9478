"""`python -m ckpt_component.apps.bench`, the same as `ckpt-bench`."""

from .app import main

if __name__ == "__main__":
    main()
