"""Drafts of tokens to come, and how many of them pay: proposers, acceptance, lengths."""
