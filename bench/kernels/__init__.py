"""What single kernels take: products of weights, and mixtures of experts."""
