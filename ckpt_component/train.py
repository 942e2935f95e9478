"""`python -m ckpt_component.train`, the same as `ckpt-train`."""

import runpy

if __name__ == "__main__":
    # By name, because the example stands above the package, which imports nothing of it.
    runpy.run_module("ckpt_train.app", run_name="__main__", alter_sys=True)
