"""`ckpt-bench hosts`: copies between servers on several hosts, and loads whose hosts read each byte once."""
