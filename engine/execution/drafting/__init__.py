"""A draft model: what it must have in common with the engine's own, and its steps."""
