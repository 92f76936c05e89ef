"""Builds the modules of a model, and registers their weights under checkpoint names."""
