"""`python -m ckpt_bench`, the same as `ckpt-bench`."""

from .app import main

if __name__ == "__main__":
    main()
