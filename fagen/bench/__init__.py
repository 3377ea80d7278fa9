"""Benchmarks: `compile` times builds beside an empty file's, `forward` times kernels beside PyTorch's on a GPU."""
