"""Moves of running requests to other engines: which requests, to which engine, and when."""
