"""A scheduled step on its device: runner, batches, CUDA graphs."""
