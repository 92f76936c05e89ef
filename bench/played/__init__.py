"""Simulated engines, and load generators for a gateway in front of them."""
