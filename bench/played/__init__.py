"""Engines that are played, and load for a gateway in front of them."""
