"""Requests in an engine process, for both roles."""
