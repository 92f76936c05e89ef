"""Attention, KV store, sampling, norm and rope: each kernel with a torch reference."""
