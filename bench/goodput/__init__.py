"""Goodput: the rate at which requests meet their targets, for whole systems over HTTP."""
