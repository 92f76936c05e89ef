"""Matrix products of few rows."""
