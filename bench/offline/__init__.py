"""A public offline workload through `LLM`: all requests arrive at once."""
