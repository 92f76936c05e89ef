"""Norms, activations, and the interface of the operations that each device implements."""
