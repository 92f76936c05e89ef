"""One request as every part sees it: tokens, sampling, constraint, timeline."""
