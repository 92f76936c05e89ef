"""Engines of several hosts: how ranks of other hosts join rank 0, and pass activations."""
