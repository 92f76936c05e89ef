"""The time of single kernels: weight GEMMs, mixtures of experts, prefill attention."""
