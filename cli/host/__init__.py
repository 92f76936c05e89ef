"""Inspection of this host before anything starts: GPUs, packages; and certificates."""
