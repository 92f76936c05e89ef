"""The model: configuration, weights, layers."""
