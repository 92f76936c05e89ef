"""Blocks between GPUs without peer access."""
