"""Engines larger than a host: how the ranks of other hosts come to rank 0, and pass activations."""
