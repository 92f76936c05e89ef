"""Exporting a pool's memory to pullers on the same host."""
