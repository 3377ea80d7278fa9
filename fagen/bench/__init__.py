"""Benchmarks: `compile` times builds beside an empty file's, `speed` times kernels beside others' on a GPU."""
