"""Beam search: choosing the continuations of a prompt, and the sequences that compute them."""
