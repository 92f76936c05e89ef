"""The cost and gain of decoding methods beside the plain step: drafts, beams, adapters."""
