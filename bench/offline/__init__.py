"""A public workload through `LLM`, all requests there at once."""
