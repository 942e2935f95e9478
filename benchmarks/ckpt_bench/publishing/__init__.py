"""`ckpt-bench publish`: versions of weights for inference, what they cost, and how soon receivers have them."""
