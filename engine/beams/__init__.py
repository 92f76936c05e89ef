"""Beam search: which continuations of a prompt go on, and the sequences that compute them."""
