"""Samples tokens from logits."""
