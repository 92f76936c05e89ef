"""Generation without a server: LLM for Python, batches of request lines in files."""
