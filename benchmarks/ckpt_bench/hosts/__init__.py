"""`ckpt-bench hosts`: copies between keepers on several hosts, and loads whose hosts read each byte once."""
