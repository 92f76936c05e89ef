"""Paged attention: torch, FlashInfer, Triton."""
