"""Norms, activations, and the set of operations that a device fills."""
