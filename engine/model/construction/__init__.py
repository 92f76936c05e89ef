"""Builds the modules of a model, and names their weights as checkpoints do."""
