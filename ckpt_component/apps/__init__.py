"""Applications on top of the library: training example, benchmark, sweeps, tuning, commands."""
