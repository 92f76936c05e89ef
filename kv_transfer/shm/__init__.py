"""Blocks between CPU engines of one host."""
