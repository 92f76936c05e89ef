"""Steps on a GPU: CUDA graphs, launches, and input arrays."""
