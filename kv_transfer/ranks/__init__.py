"""A pull by all ranks of an engine."""
