"""The engines as a gateway sees them: links, load, routing."""
