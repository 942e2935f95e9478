"""The training job of `ckpt-train`: a small GPT on real text, in a Megatron-style loop.

Read `loop.py` first. Nothing in the rest of the package needs this example.
"""
