"""Draft models and draft heads: checks against the engine's model, loading, and steps."""
