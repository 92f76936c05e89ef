"""Generation without a server: LLM for Python, and batches of requests in files."""
