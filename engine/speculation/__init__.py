"""Speculative decoding: proposers of drafts, acceptance rates, and the number of drafts."""
