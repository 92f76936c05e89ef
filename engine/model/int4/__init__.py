"""Weights of four bits as checkpoints have them."""
