"""Weights of a model: where they lie, and how a checkpoint's files fill them."""
