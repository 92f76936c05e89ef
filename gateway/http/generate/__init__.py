"""What both endpoints that generate share, and /v1/completions."""
